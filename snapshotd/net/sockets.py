"""Finds the sockets of a rank, and on the nodes of its peers the sockets it is connected to.

Descriptors come from /proc/PID/fd, whose links name a socket's inode; addresses and states come from sock_diag, by inode. A
socket that is neither bound nor connected is in no table of the kernel, so it is queried through a borrowed descriptor. So is
one whose connection was reset: it keeps its address, and CRIU would bind it again.

Nothing here changes a socket. A process or descriptor that disappears during the search is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from snapshotd.net.flows import Address, Family, Flow, Holder, Pair
from snapshotd.proc.fd import read_links
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

_STATES = {
    1: "established",
    2: "syn-sent",
    3: "syn-recv",
    4: "fin-wait-1",
    5: "fin-wait-2",
    6: "time-wait",
    7: "close",
    8: "close-wait",
    9: "last-ack",
    10: "listen",
    11: "closing",
    12: "syn-recv",
}
_CLOSE = 7
_EVERY_STATE = (1 << 13) - 1
_INFO = 1 << 1  # INET_DIAG_INFO: with it the kernel also reports signed segments
_SHUTDOWN = ("", "read", "write", "both")
_FAMILIES: dict[Family, int] = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_DIAG_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}
#: Names in /proc of the protocols of sockets with an IP address, and of packet sockets, which see all addresses.
_INET = ("TCP", "UDP", "MPTCP", "SCTP", "DCCP", "SMC", "RAW", "PING", "PACKET")

_GONE = (FileNotFoundError, ProcessLookupError)
_libc = ctypes.CDLL(None, use_errno=True)


def tree_flows(pids: Iterable[int]) -> list[Flow]:
    """Every inet socket that one of these processes has, whatever its state, each once with all its holders."""
    held = _descriptors(pids)
    protocols: dict[int, tuple[str, Family]] = {}
    for inode, holders in held.items():
        found = _protocol(holders)
        if found is not None:
            protocols[inode] = found
    listed = _all_rows({name for name, _ in protocols.values()} & _DIAG_PROTOCOLS.keys(), extensions=_INFO)
    rows = {flow.inode: flow for flow in listed}
    flows = []
    for inode, (name, family) in sorted(protocols.items()):
        row = rows.get(inode) or _unlisted(name, family, inode, held[inode])
        flows.append(replace(row, holders=tuple(sorted(held[inode]))))
    return flows


def find_peers(
    pairs: Iterable[Pair], forwarded: Mapping[Address, Address] | None = None, among: Iterable[int] | None = None
) -> dict[Pair, Flow]:
    """The sockets of this node that are connected to a rank, by the pair as the *rank* has it.

    `forwarded` maps former to present addresses of the rank: a socket that connected through a forwarding still names
    the former one, and if it did so over loopback it has a loopback address itself where the rank sees this node's. A
    pair without a socket on this node is not in the result. `among` limits the search for holders to these processes.
    """
    wanted = list(pairs)
    former: dict[Address, list[Address]] = defaultdict(list)
    for old, new in (forwarded or {}).items():
        former[new].append(old)
    endpoints = {flow.endpoints: flow for flow in _all_rows({"tcp"}) if flow.connected}
    over_loopback = {(local.port, remote): flow for (local, remote), flow in endpoints.items() if local.loopback}
    own = own_addresses() if over_loopback and former else frozenset()
    found: dict[Pair, Flow] = {}
    for pair in wanted:
        rank, peer = pair
        names = [rank, *former[rank]]
        matches = [endpoints[peer, name] for name in names if (peer, name) in endpoints]
        if not matches and peer.ip in own:
            keys = [(peer.port, name) for name in names if name.loopback]
            matches = [over_loopback[key] for key in keys if key in over_loopback]
        if matches:
            found[pair] = matches[0]
    holders = _descriptors(_every_pid() if among is None else among, {flow.inode for flow in found.values()} - {0})
    return {pair: replace(flow, holders=tuple(sorted(holders.get(flow.inode, ())))) for pair, flow in found.items()}


def existing(pairs: Iterable[Pair]) -> list[Pair]:
    """Those of these (local, remote) pairs that a TCP socket of this node has, also one that the kernel is closing."""
    wanted = set(pairs)
    if not wanted:
        return []
    return sorted(wanted & {flow.endpoints for flow in _all_rows({"tcp"}) if flow.connected})


def listeners(ports: Collection[int] | None = None) -> list[Flow]:
    """The listeners of this node, without holders: their ports are not free for a rank that moves here."""
    return [flow for flow in _all_rows({"tcp"}) if flow.listens and (ports is None or flow.local.port in ports)]


def arriving(ports: Collection[int]) -> list[Flow]:
    """Connections to these ports whose handshake is not complete: the SYN was answered, the final ACK has not arrived."""
    return [flow for flow in _all_rows({"tcp"}) if flow.state == "syn-recv" and flow.local.port in ports]


def own_addresses() -> frozenset[str]:
    """The IP addresses of this node, including loopback and link-local ones."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        rows = [row.get("IFA_LOCAL") or row.get("IFA_ADDRESS") for row in netlink.get_addr()]
    return frozenset(Address(str(ip), 0).ip for ip in rows if ip)


# ---------------------------------------------------------------- descriptors


def borrow(holder: Holder, inode: int | None = None) -> socket.socket:
    """The socket of another process, as a descriptor of this one; closing it does not affect the other process.

    `inode`: it must be this socket and not a later one with the same descriptor number. Raises ProcessLookupError if that
    process, or its descriptor of that socket, no longer exists.
    """
    with Process(holder.pid, holder.start_ticks).pidfd() as pidfd:
        # int pidfd_getfd(int pidfd, int targetfd, unsigned int flags);
        descriptor = int(_libc.syscall(438, pidfd, holder.fd, 0))
        if descriptor < 0:
            number = ctypes.get_errno()
            raise ProcessLookupError(f"process {holder.pid}, descriptor {holder.fd}: {os.strerror(number)}")
    if inode is not None and os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise ProcessLookupError(f"descriptor {holder.fd} of process {holder.pid} is another file now")
    return socket.socket(fileno=descriptor)


def borrow_from(holders: Iterable[Holder], inode: int) -> socket.socket | None:
    """`borrow` from the first of its holders that still has it; None if each has exited or closed it."""
    for holder in holders:
        try:
            return borrow(holder, inode)
        except ProcessLookupError as error:
            log.info("socket %d: %s", inode, error)
    return None


def inode_of(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def _every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _descriptors(pids: Iterable[int], inodes: Collection[int] | None = None) -> dict[int, list[Holder]]:
    """inode -> holders, of all sockets (or of these) that the processes hold."""
    found: dict[int, list[Holder]] = defaultdict(list)
    if inodes is not None and not inodes:
        return found
    # In a search of the whole node, processes that root of a container may not inspect (its pid 1) hold none of these.
    passed_over = _GONE if inodes is None else (*_GONE, PermissionError)
    for pid in pids:
        with contextlib.suppress(*passed_over):
            start_ticks = Process.of(pid).start_ticks
            for number, link, _ in read_links(pid):
                if link.startswith("socket:["):
                    inode = int(link[8:-1])
                    if inodes is None or inode in inodes:
                        found[inode].append(Holder(pid, start_ticks, number))
    return found


def _protocol(holders: Iterable[Holder]) -> tuple[str, Family] | None:
    """The protocol and family of a socket, from any of its holders; None if it has no IP address, or no holder any more."""
    for holder in holders:
        with contextlib.suppress(OSError):  # closed since; the descriptor may be another file now
            raw = os.getxattr(f"/proc/{holder.pid}/fd/{holder.fd}", "system.sockprotoname")
            name = raw.rstrip(b"\0").decode(errors="replace")
            if not name.startswith(_INET):
                return None
            return name.removesuffix("v6").lower(), "inet6" if name.endswith("v6") else "inet"
    return None


# ---------------------------------------------------------------- the kernel's tables


def _all_rows(protocols: Collection[str], extensions: int = 0) -> list[Flow]:
    """All sockets of these protocols in this network namespace, without holders."""
    from pyroute2 import DiagSocket  # half a second and 13 MiB, not needed for a rank without connections

    flows: list[Flow] = []
    with DiagSocket() as diag:
        diag.bind()
        for protocol in protocols:
            for family, number in _FAMILIES.items():
                question = {"family": number, "protocol": _DIAG_PROTOCOLS[protocol], "states": _EVERY_STATE}
                rows = diag.get_sock_stats(**question, extensions=extensions)
                # The family is checked again: the library does not distinguish errors from answers here.
                flows += [_flow(protocol, family, row) for row in rows if row.get("idiag_family") == number]
    return flows


def _flow(protocol: str, family: Family, row: Any) -> Flow:
    state = _STATES.get(row["idiag_state"], "unknown")
    listens = state == "listen"
    return Flow(
        protocol=protocol,
        family=family,
        state=state,
        local=Address(row["idiag_src"], row["idiag_sport"]),
        remote=Address(row["idiag_dst"], row["idiag_dport"]) if row["idiag_dport"] else None,
        inode=row["idiag_inode"],
        v6only=bool(row.get("INET_DIAG_SKV6ONLY")),
        device=_device(row["idiag_if"]),
        shutdown=_SHUTDOWN[(row.get("INET_DIAG_SHUTDOWN") or 0) & 3],
        signed=row.get("INET_DIAG_MD5SIG") is not None,
        unread_bytes=0 if listens else row["idiag_rqueue"],
        unacked_bytes=0 if listens else row["idiag_wqueue"],
        waiting=row["idiag_rqueue"] if listens else 0,
    )


def _device(index: int) -> str:
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return f"device {index}"


def _unlisted(protocol: str, family: Family, inode: int, holders: Iterable[Holder]) -> Flow:
    """A socket that is in no table: described by querying it."""
    nowhere = Address("0.0.0.0" if family == "inet" else "::", 0)
    flow = Flow(protocol, family, "close", nowhere, None, inode)
    for holder in holders:
        with contextlib.suppress(*_GONE), borrow(holder, inode) as sock:
            if sock.family not in _FAMILIES.values():
                return flow
            if protocol == "tcp" and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _CLOSE:
                flow = replace(flow, state="elsewhere")  # in a table of another network namespace
            with contextlib.suppress(OSError):  # a protocol without ports
                return replace(flow, local=Address(*sock.getsockname()[:2]))
    return flow
