"""Builds the lab's switch and links through netlink; no `ip` binary is needed.

The switch is a network namespace with a bridge; the operator's address is that of the bridge. A node's eth0 is one end of
a veth pair whose other end is a port of the bridge. Nothing is added to the host's network, so labs cannot collide.

A cut adds permanent neighbour entries, so that both sides send to a hardware address that does not exist. Packets are lost
without an error, in both directions. The cut uses no kernel module, packet filter or queue that the product itself uses.

A network namespace belongs to a thread, so each function here does its work in a short-lived thread.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import AF_INET, AF_INET6
from typing import Any, TypeVar

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from migrator.lab.inside import CLONE_NEWNET, setns
from migrator.lab.layout import PREFIX_LENGTH, LabProcess, address
from snapshotd.api.errors import Internal

BRIDGE = "br0"
UNUSED_MAC = "02:00:00:00:00:00"

Result = TypeVar("Result")


def _hardware_address(index: int | None) -> str:
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address(index).split("."))


def _addresses(index: int | None) -> list[tuple[int, str]]:
    """The addresses at which the others reach it: its own, and the link-local one that the kernel assigns."""
    mac = bytes(int(part, 16) for part in _hardware_address(index).split(":"))
    host = bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
    return [(AF_INET, address(index)), (AF_INET6, str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + host)))]


def in_netns(process: LabProcess, act: Callable[[Any], Result]) -> Result:
    """Runs act(IPRoute) in the network namespace of a process."""

    def work() -> Result:
        descriptor = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(descriptor, CLONE_NEWNET)
        finally:
            os.close(descriptor)
        with IPRoute() as netlink:
            return act(netlink)

    try:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(work).result()
    except (NetlinkError, OSError) as error:
        raise Internal(
            f"the lab's network could not be set up: {error}",
            remedy="the kernel needs bridge and veth (CONFIG_BRIDGE, CONFIG_VETH), and this needs root",
        ) from error


def make_switch(switch: LabProcess) -> None:
    """Creates the bridge, with the operator's address."""

    def act(netlink: Any) -> None:
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        netlink.link("add", ifname=BRIDGE, kind="bridge", br_mcast_snooping=0, address=_hardware_address(None))
        bridge = netlink.link_lookup(ifname=BRIDGE)[0]
        netlink.addr("add", index=bridge, address=address(None), prefixlen=PREFIX_LENGTH)
        netlink.link("set", index=bridge, state="up")

    in_netns(switch, act)


def plug_in(switch: LabProcess, node: LabProcess, index: int) -> None:
    """Links node number `index` to the switch and assigns the node's address."""

    def at_switch(netlink: Any) -> None:
        peer = {"ifname": "eth0", "address": _hardware_address(index), "net_ns_pid": node.pid}
        netlink.link("add", ifname=_port(index), kind="veth", peer=peer)
        bridge = netlink.link_lookup(ifname=BRIDGE)[0]
        netlink.link("set", index=netlink.link_lookup(ifname=_port(index))[0], master=bridge, state="up")

    def at_node(netlink: Any) -> None:
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        cable = netlink.link_lookup(ifname="eth0")[0]
        netlink.addr("add", index=cable, address=address(index), prefixlen=PREFIX_LENGTH)
        netlink.link("set", index=cable, state="up")

    in_netns(switch, at_switch)
    in_netns(node, at_node)


def unplug(switch: LabProcess, index: int) -> None:
    """Removes a node's link, so that nothing its dying processes still send is delivered."""

    def act(netlink: Any) -> None:
        for port in netlink.link_lookup(ifname=_port(index)):
            netlink.link("del", index=port)

    in_netns(switch, act)


@dataclass(frozen=True)
class End:
    """One side of a cut: a process in the network namespace, and the node's number (None: the operator)."""

    process: LabProcess
    index: int | None


def cut(a: End, b: End) -> None:
    """From now on packets between the two are lost, both ways."""

    def stop(other: End) -> Callable[[Any], None]:
        def act(netlink: Any) -> None:
            link = _link(netlink)
            for family, where in _addresses(other.index):
                netlink.neigh("replace", family=family, dst=where, lladdr=UNUSED_MAC, ifindex=link, state="permanent")

        return act

    in_netns(a.process, stop(b))
    in_netns(b.process, stop(a))


def mend(a: End, b: End) -> None:
    """Undoes `cut`. Idempotent."""

    def resume(other: End) -> Callable[[Any], None]:
        def act(netlink: Any) -> None:
            link = _link(netlink)
            for family, where in _addresses(other.index):
                try:
                    netlink.neigh("del", family=family, dst=where, ifindex=link)
                except NetlinkError as error:
                    if error.code != errno.ENOENT:
                        raise

        return act

    in_netns(a.process, resume(b))
    in_netns(b.process, resume(a))


def _port(index: int) -> str:
    return f"port{index}"


def _link(netlink: Any) -> int:
    """The link to the other nodes: eth0 in a node, the bridge in the switch."""
    found = netlink.link_lookup(ifname="eth0") or netlink.link_lookup(ifname=BRIDGE)
    return int(found[0])
