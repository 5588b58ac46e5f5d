"""Socket options that criu does not restore: read from the frozen rank on the source, set on the target.

Found by comparing every option before a dump and after the restore (criu 4.2.1). Options that criu restores, and those that
the kernel computes (TCP_QUICKACK, TCP_MAXSEG and TCP_WINDOW_CLAMP of a connection), are not here. An option is kept only if
it differs from that of a new socket: what was never set follows the defaults of the node.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from snapshotd.net.flows import Flow, Holder
from snapshotd.net.sockets import borrow
from snapshotd.proc.tree import Process, inner_pid

_SOL, _IP, _IPV6, _TCP = socket.SOL_SOCKET, socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.IPPROTO_TCP

#: In the order in which they are set. Numbers where Python has no name.
_OPTIONS: dict[str, tuple[int, int]] = {
    "SO_MAX_PACING_RATE": (_SOL, 47),
    "SO_BUSY_POLL": (_SOL, 46),
    "SO_TIMESTAMPING": (_SOL, 37),
    "SO_ZEROCOPY": (_SOL, 60),
    "TCP_CONGESTION": (_TCP, socket.TCP_CONGESTION),
    "TCP_USER_TIMEOUT": (_TCP, socket.TCP_USER_TIMEOUT),
    "TCP_NOTSENT_LOWAT": (_TCP, socket.TCP_NOTSENT_LOWAT),
    "TCP_LINGER2": (_TCP, socket.TCP_LINGER2),
    "TCP_SYNCNT": (_TCP, socket.TCP_SYNCNT),
    "TCP_DEFER_ACCEPT": (_TCP, socket.TCP_DEFER_ACCEPT),
    "TCP_FASTOPEN": (_TCP, socket.TCP_FASTOPEN),
    "TCP_THIN_LINEAR_TIMEOUTS": (_TCP, 16),
    "TCP_INQ": (_TCP, 36),
    "IP_TOS": (_IP, socket.IP_TOS),  # of IPv6 sockets that use IPv4; criu restores the others
    "IP_TTL": (_IP, socket.IP_TTL),
    "IP_MTU_DISCOVER": (_IP, 10),
    "IP_RECVERR": (_IP, 11),
    "IP_RECVTTL": (_IP, 12),
    "IP_RECVTOS": (_IP, 13),
    "IP_TRANSPARENT": (_IP, 19),
    "IP_MINTTL": (_IP, 21),
    "IP_BIND_ADDRESS_NO_PORT": (_IP, 24),
    "IPV6_UNICAST_HOPS": (_IPV6, socket.IPV6_UNICAST_HOPS),
    "IPV6_TCLASS": (_IPV6, socket.IPV6_TCLASS),
    "IPV6_MTU_DISCOVER": (_IPV6, 23),
    "IPV6_RECVERR": (_IPV6, 25),
    "IPV6_RECVHOPLIMIT": (_IPV6, socket.IPV6_RECVHOPLIMIT),
    "IPV6_RECVTCLASS": (_IPV6, socket.IPV6_RECVTCLASS),
    "IPV6_AUTOFLOWLABEL": (_IPV6, 70),
    "IPV6_MINHOPCOUNT": (_IPV6, 73),
}

#: option's name -> its value, as hexadecimal text
Options = dict[str, str]


@dataclass(frozen=True)
class Kept:
    """The options of one socket, which is identified by a descriptor and a pid of the rank's own pid namespace."""

    pid_inside: int
    fd: int
    options: Options

    def to_json(self) -> dict[str, Any]:
        return {"pid_inside": self.pid_inside, "fd": self.fd, "options": self.options}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Kept:
        options = {str(name): bytes.fromhex(value).hex() for name, value in fields["options"].items()}
        return cls(int(fields["pid_inside"]), int(fields["fd"]), options)


def keep(flows: Iterable[Flow]) -> list[Kept]:
    """The options of all sockets that have any. The rank is stopped."""
    fresh: dict[tuple[int, int], Options] = {}
    kept = []
    for flow in flows:
        for holder in flow.holders:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError), borrow(holder, flow.inode) as sock:
                kind = sock.family, sock.type
                if kind not in fresh:
                    with socket.socket(*kind) as other:
                        fresh[kind] = _read(other)
                found = {name: value for name, value in _read(sock).items() if value != fresh[kind].get(name)}
                if found:
                    kept.append(Kept(inner_pid(holder.pid), holder.fd, found))
                break
    return kept


def put_back(kept: Iterable[Kept], processes: Mapping[int, Process]) -> list[str]:
    """Sets them on the target, before the rank runs; `processes` by their pid in the rank's pid namespace.

    Returns what this node does not accept, as text: a missing congestion control is no reason to fail a move.
    """
    refused = []
    for item in kept:
        process = processes[item.pid_inside]
        with borrow(Holder(process.pid, process.start_ticks, item.fd)) as sock:
            now = _read(sock)
            for name in _OPTIONS:
                if name in item.options and now.get(name) != item.options[name]:
                    try:
                        sock.setsockopt(*_OPTIONS[name], bytes.fromhex(item.options[name]))
                    except OSError as error:
                        refused.append(f"descriptor {item.fd} of process {item.pid_inside}: {name}: {error.strerror}")
    return refused


def _read(sock: socket.socket) -> Options:
    found = {}
    for name, (level, option) in _OPTIONS.items():
        if level == _IPV6 and sock.family != socket.AF_INET6:
            continue
        with contextlib.suppress(OSError):  # a kernel without it, or another protocol
            found[name] = sock.getsockopt(level, option, 32).hex()
    return found
