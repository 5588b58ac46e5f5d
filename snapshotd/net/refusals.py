"""Names the sockets of a rank that cannot be moved, each with the reason.

Changes nothing: pending errors are detected by poll, because reading SO_ERROR would clear them.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from snapshotd.net.flows import Flow
from snapshotd.net.sockets import borrow

_TCP_FASTOPEN_CONNECT, _TCP_ULP, _TCP_AO_INFO = 30, 31, 40
_libc = ctypes.CDLL(None)

_STATE_REASONS = {
    "fin-wait-1": "half-closed: the rank has closed its side",
    "fin-wait-2": "half-closed: the rank has closed its side",
    "close-wait": "half-closed: the peer has closed its side",
    "closing": "closing on both sides",
    "last-ack": "closing on both sides",
    "time-wait": "closed a moment ago",
    "syn-sent": "still connecting",
    "syn-recv": "still connecting",
    "elsewhere": "a socket of another network namespace",
}
_HALF_CLOSED = ("fin-wait-1", "fin-wait-2", "close-wait")
_PASSING = ("syn-sent", "syn-recv", "closing", "last-ack", "time-wait")
_PROTOCOL_REASONS = {
    "mptcp": "a Multipath TCP socket",
    "sctp": "an SCTP socket",
    "dccp": "a DCCP socket",
    "smc": "an SMC socket",
    "raw": "a raw socket",
    "ping": "an ICMP socket",
    "packet": "a packet socket",
    "udplite": "a UDP-Lite socket",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a socket cannot be moved. `passing`: it probably can a moment later. `half_closed`: no problem for a connection
    that ends with the move anyway, or whose peer has gone."""

    flow: Flow
    reason: str
    passing: bool = False
    half_closed: bool = False

    def __str__(self) -> str:
        return f"{self.flow}: {self.reason}"


def problems(flows: Iterable[Flow]) -> list[Problem]:
    """All reasons against moving these sockets: those of a rank, or the peers' sockets that `find_peers` returned."""
    return [problem for flow in flows for problem in _of(flow)]


def _of(flow: Flow) -> list[Problem]:
    if flow.protocol == "tcp":
        found = _from_tables(flow)
        return found if any(not problem.half_closed for problem in found) else found + _from_socket(flow)
    if flow.protocol == "udp":
        # A connected one only needs a new address. Datagrams to an unconnected one would be lost unnoticed.
        if flow.local.port and not flow.connected:
            return [Problem(flow, "a UDP port: datagrams to the former address would be lost")]
        return []
    return [Problem(flow, _PROTOCOL_REASONS.get(flow.protocol, f"a socket of the protocol {flow.protocol}"))]


def _from_tables(flow: Flow) -> list[Problem]:
    """What the kernel's tables show."""
    found = []
    if flow.state in _STATE_REASONS:
        half_closed = flow.state in _HALF_CLOSED and bool(flow.holders)
        found.append(Problem(flow, _STATE_REASONS[flow.state], flow.state in _PASSING, half_closed))
    elif flow.connected and not flow.holders:
        reason = "no process that can be inspected holds it" if flow.inode else "it was not accepted yet"
        found.append(Problem(flow, reason, passing=True))
    elif flow.connected and flow.shutdown:
        found.append(Problem(flow, f"half-closed: shut down for {flow.shutdown}", half_closed=True))
    if flow.waiting:
        found.append(Problem(flow, f"{flow.waiting} connections wait to be accepted", passing=True))
    if flow.signed:
        found.append(Problem(flow, "signed segments (TCP-MD5)"))
    if flow.local.link_local or (flow.remote is not None and flow.remote.link_local):
        found.append(Problem(flow, "a link-local address, which is valid on one node alone"))
    return found


def _from_socket(flow: Flow) -> list[Problem]:
    """What only the socket itself can tell."""
    for holder in flow.holders:
        with contextlib.suppress(ProcessLookupError), borrow(holder, flow.inode) as sock:
            return [Problem(flow, reason, passing) for reason, passing in _inspect(flow, sock)]
    return []


def _inspect(flow: Flow, sock: socket.socket) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    poll = select.poll()
    poll.register(sock, select.POLLPRI)
    events = dict(poll.poll(0)).get(sock.fileno(), 0)
    if flow.connected and events & select.POLLPRI:
        found.append(("unread urgent data", True))
    if events & select.POLLERR and not was_reset(flow, sock):
        found.append(("an unread error, or an unread message in its error queue", True))
    protocol = _option(sock, _TCP_ULP, 16).rstrip(b"\0").decode(errors="replace")
    if protocol:
        found.append((f"TLS in the kernel ({protocol})" if protocol == "tls" else f"handled by {protocol}", False))
    if not flow.connected and not flow.listens and any(_option(sock, _TCP_FASTOPEN_CONNECT, 4)):
        found.append(("a TCP Fast Open connection that has not begun", True))
    if _has_authentication(sock):
        found.append(("signed segments (TCP-AO)", False))
    return found


def was_reset(flow: Flow, sock: socket.socket) -> bool:
    """Whether this is a connection that was reset, by an earlier move or by its peer, and whose process has not noticed yet.
    It is restored closed, and then reset again (snapshotd/net/reset.py)."""
    if flow.protocol != "tcp" or flow.state != "close" or flow.connected:
        return False
    poll = select.poll()
    poll.register(sock, 0)
    return bool(dict(poll.poll(0)).get(sock.fileno(), 0) & select.POLLERR)


def _option(sock: socket.socket, name: int, size: int) -> bytes:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, name, size)
    except OSError:  # a kernel without it
        return b""


def _has_authentication(sock: socket.socket) -> bool:
    # struct tcp_ao_info_opt must be zeroed; Python's getsockopt passes uninitialised memory.
    buffer, size = ctypes.create_string_buffer(48), ctypes.c_uint(48)
    return not _libc.getsockopt(sock.fileno(), socket.IPPROTO_TCP, _TCP_AO_INFO, buffer, ctypes.byref(size))
