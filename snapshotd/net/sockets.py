"""Finds sockets: all of a rank's, and on the nodes of its peers the other ends of its connections.

Descriptors come from /proc/PID/fd, whose links name a socket's inode; addresses and states from sock_diag, by inode. A
socket that is neither bound nor connected is in no table of the kernel, so it is asked itself through a borrowed
descriptor, as is one whose connection was reset: it keeps its address, and CRIU would bind it again.

Nothing here changes a socket. A process or descriptor that vanishes while it is looked at is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from snapshotd.net.flows import Address, Family, Flow, Holder, Pair
from snapshotd.proc.fd import read_links
from snapshotd.proc.tree import Process

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
_INFO = 1 << 1  # INET_DIAG_INFO: with it the kernel also says whether segments are signed
_SHUTDOWN = ("", "read", "write", "both")
_FAMILIES: dict[Family, int] = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_DIAG_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}
#: What /proc calls the protocols of sockets that have an IP address, and packet sockets, which have all of them.
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


def find_ends(
    pairs: Iterable[Pair], forwarded: Mapping[Address, Address] | None = None, among: Iterable[int] | None = None
) -> dict[Pair, Flow]:
    """The sockets of this node that are the other ends of a rank's connections, by the pair as the *rank* has it.

    `forwarded` is former -> present address of the rank: an end that connected through a forwarding still names the former
    one, and one that did so over loopback also has a loopback address itself where the rank sees this node's. A pair
    whose other end is not here is not in the answer. `among` limits the search for holders to these processes.
    """
    wanted = list(pairs)
    former: dict[Address, list[Address]] = defaultdict(list)
    for old, new in (forwarded or {}).items():
        former[new].append(old)
    ends = {flow.ends: flow for flow in _all_rows({"tcp"}) if flow.connected}
    over_loopback = {(local.port, remote): flow for (local, remote), flow in ends.items() if local.loopback}
    own = own_addresses() if over_loopback and former else frozenset()
    found: dict[Pair, Flow] = {}
    for pair in wanted:
        rank, peer = pair
        names = [rank, *former[rank]]
        matches = [ends[peer, name] for name in names if (peer, name) in ends]
        if not matches and peer.ip in own:
            keys = [(peer.port, name) for name in names if name.loopback]
            matches = [over_loopback[key] for key in keys if key in over_loopback]
        if matches:
            found[pair] = matches[0]
    holders = _descriptors(_every_pid() if among is None else among, {flow.inode for flow in found.values()} - {0})
    return {pair: replace(flow, holders=tuple(sorted(holders.get(flow.inode, ())))) for pair, flow in found.items()}


def listeners(ports: Collection[int] | None = None) -> list[Flow]:
    """What listens on this node, without holders: a port of these is taken for a rank that would come here."""
    return [flow for flow in _all_rows({"tcp"}) if flow.listens and (ports is None or flow.local.port in ports)]


def arriving(ports: Collection[int]) -> list[Flow]:
    """Connections to these ports that are only being made: the caller's SYN was answered, its last word is under way."""
    return [flow for flow in _all_rows({"tcp"}) if flow.state == "syn-recv" and flow.local.port in ports]


def own_addresses() -> frozenset[str]:
    """The IP addresses of this node, its loopback ones and those of a single link included."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        rows = [row.get("IFA_LOCAL") or row.get("IFA_ADDRESS") for row in netlink.get_addr()]
    return frozenset(Address(str(ip), 0).ip for ip in rows if ip)


# ---------------------------------------------------------------- where the other end is


class Whereabouts(StrEnum):
    INSIDE = "inside the rank"  # it moves along
    NODE = "on this node"  # a process that stays here
    PEER = "on another node"  # a daemon there re-points it
    OUTSIDE = "outside the cluster"  # nobody there can re-point it


@dataclass(frozen=True, slots=True)
class OtherEnd:
    whereabouts: Whereabouts
    node: str = ""  # of a PEER


def classify(
    flow: Flow,
    tree: Iterable[Flow],
    own: Collection[str],
    nodes: Mapping[str, Collection[str]],
    forwarded: Mapping[Address, Address] | None = None,
) -> OtherEnd:
    """Where the other end of a connected flow of the rank is.

    `tree` is all flows of the rank, `own` this node's addresses, `nodes` the addresses of the other nodes by name, and
    `forwarded` former -> present addresses of all ranks that moved: the flow may name a former one.
    """
    local, named = flow.ends
    remote = (forwarded or {}).get(named, named)
    mirrored = {(remote, local), (named, local)}
    if any(other.connected and other.inode != flow.inode and other.ends in mirrored for other in tree):
        return OtherEnd(Whereabouts.INSIDE)
    if remote.loopback or remote.ip in own:
        return OtherEnd(Whereabouts.NODE)
    for node, addresses in nodes.items():
        if remote.ip in addresses:
            return OtherEnd(Whereabouts.PEER, node)
    return OtherEnd(Whereabouts.OUTSIDE)


# ---------------------------------------------------------------- descriptors


def borrow(holder: Holder, inode: int | None = None) -> socket.socket:
    """The very socket that another process has, as a descriptor of ours; to close it changes nothing for the other.

    `inode`: it must be this socket and no later one with the same number. Raises ProcessLookupError when that process, or
    its descriptor of that socket, no longer exists.
    """
    pidfd = os.pidfd_open(holder.pid)
    try:
        if Process.of(holder.pid).start_ticks != holder.start_ticks:
            raise ProcessLookupError(f"process {holder.pid} is another one by now")
        # int pidfd_getfd(int pidfd, int targetfd, unsigned int flags);
        descriptor = int(_libc.syscall(438, pidfd, holder.fd, 0))
        if descriptor < 0:
            number = ctypes.get_errno()
            raise ProcessLookupError(f"process {holder.pid}, descriptor {holder.fd}: {os.strerror(number)}")
    finally:
        os.close(pidfd)
    if inode is not None and os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise ProcessLookupError(f"process {holder.pid} has something else at descriptor {holder.fd} by now")
    return socket.socket(fileno=descriptor)


def inode_of(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def _every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _descriptors(pids: Iterable[int], inodes: Collection[int] | None = None) -> dict[int, list[Holder]]:
    """inode -> holders, of all sockets (or of these) that the processes have."""
    found: dict[int, list[Holder]] = defaultdict(list)
    if inodes is not None and not inodes:
        return found
    # In a search through the whole node, what a container's root may not look into (its pid 1) has none of ours.
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
    """The protocol and family of a socket by any of its holders; None where it has no IP address, or nobody any more."""
    for holder in holders:
        with contextlib.suppress(OSError):  # closed since, and the descriptor may be another file's by now
            raw = os.getxattr(f"/proc/{holder.pid}/fd/{holder.fd}", "system.sockprotoname")
            name = raw.rstrip(b"\0").decode(errors="replace")
            if not name.startswith(_INET):
                return None
            return name.removesuffix("v6").lower(), "inet6" if name.endswith("v6") else "inet"
    return None


# ---------------------------------------------------------------- the kernel's tables


def _all_rows(protocols: Collection[str], extensions: int = 0) -> list[Flow]:
    """All sockets of these protocols in this network namespace, without holders."""
    from pyroute2 import DiagSocket  # half a second and 13 MiB that a rank without connections need not cost

    flows: list[Flow] = []
    with DiagSocket() as diag:
        diag.bind()
        for protocol in protocols:
            for family, number in _FAMILIES.items():
                question = {"family": number, "protocol": _DIAG_PROTOCOLS[protocol], "states": _EVERY_STATE}
                rows = diag.get_sock_stats(**question, extensions=extensions)
                # The family is asked again: the library does not tell errors from answers here.
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
    """A socket that no table shows: what it says of itself."""
    nowhere = Address("0.0.0.0" if family == "inet" else "::", 0)
    flow = Flow(protocol, family, "close", nowhere, None, inode)
    for holder in holders:
        with contextlib.suppress(*_GONE), borrow(holder, inode) as sock:
            if sock.family not in _FAMILIES.values():
                return flow
            if protocol == "tcp" and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _CLOSE:
                flow = replace(flow, state="elsewhere")  # in a table, but of another network namespace
            with contextlib.suppress(OSError):  # a protocol without ports
                return replace(flow, local=Address(*sock.getsockname()[:2]))
    return flow
