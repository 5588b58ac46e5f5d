"""Rebuilds a connection on a socket from its saved state alone.

Invariant: the socket is in repair mode until `rebuild` has filled both queues. Afterwards only the bytes that the application
had written but the kernel never sent, and some options, are missing. `complete` adds those, and is idempotent.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import replace

from snapshotd.net import binding, repair, socket_state
from snapshotd.net.flows import Pair
from snapshotd.net.repair import RECV_QUEUE, SEND_QUEUE, SOL, TCP
from snapshotd.net.socket_state import SocketState

#: Minimum delay of the first retransmission after a re-point. The kernel's default, 200 ms, would be most of a short pause.
#: It applies if the kernel knows the round trip (snapshotd/net/timers.py), until it has measured that again.
FIRST_RTO_MIN_US = 10_000
_ROOM_BYTES = 1 << 20
_SET_LAST = (
    "reuse_address",
    "buffer_lock",
    "port_range",
    "window_clamp",
    "rto_min_us",
    "delayed_ack_max_us",
    "peek_offset",
)

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33


def rebuild(sock: socket.socket, state: SocketState, endpoints: Pair) -> None:
    """Whatever the socket is now, makes it the connection of `state` with these endpoints, out of repair mode."""
    local, remote = endpoints
    assert state.window is not None
    repair.enter(sock)
    repair.disconnect(sock)
    repair.enter(sock)
    if sock.family == socket.AF_INET6 and remote.version == 6:
        repair.forget_mapped(sock)
    _make_room(sock, state)
    if state.options.get("rto_min_us"):
        sock.setsockopt(TCP, repair.TCP_RTO_MIN_US, FIRST_RTO_MIN_US)
    binding.bind(sock, local, remote)
    repair.set_sequence(sock, RECV_QUEUE, state.receive_start)
    repair.set_sequence(sock, SEND_QUEUE, state.send_start)
    sock.connect(repair.name_of(sock, remote))  # in repair mode no packet is sent
    if repair.pair(sock) != endpoints:
        raise OSError(errno.EADDRNOTAVAIL, f"routing selects another local address than {local.ip}")
    repair.set_negotiated(sock, state.info, state.mss)
    if remote.version == 4:
        repair.use_full_mss(sock)
    if state.info.options & repair.HAS_TIMESTAMP:
        sock.setsockopt(TCP, repair.TCP_TIMESTAMP, struct.pack("I", state.timestamp))
    repair.fill(sock, RECV_QUEUE, state.receive)
    repair.fill(sock, SEND_QUEUE, state.sent)
    (state.window if remote.version == 4 else state.window.eager()).put(sock)
    if not socket_state.agrees(sock, replace(state, send=state.sent, send_end=state.sent_end)):
        raise OSError(
            errno.EIO,
            f"the queues were not filled correctly: {repair.waiting(sock, repair.SIOCINQ)} of {len(state.receive)} "
            f"bytes to read, {repair.waiting(sock, repair.SIOCOUTQ)} of {len(state.sent)} to send, ending at "
            f"{repair.sequence(sock, RECV_QUEUE)} for {state.receive_end} and {repair.sequence(sock, SEND_QUEUE)} for "
            f"{state.sent_end}",
        )
    leave(sock, state)
    complete(sock, state)


def _make_room(sock: socket.socket, state: SocketState) -> None:
    """Queues that are filled at once take more memory than those that the application filled gradually."""
    if state.receive:
        sock.setsockopt(SOL, SO_RCVBUFFORCE, len(state.receive) * 2 + _ROOM_BYTES)
    if state.send:
        sock.setsockopt(SOL, SO_SNDBUFFORCE, len(state.send) * 2 + _ROOM_BYTES)


def leave(sock: socket.socket, state: SocketState | None) -> None:
    repair.leave(sock, state.options.get("reuse_address", 0) if state else 0)


def complete(sock: socket.socket, state: SocketState) -> None:
    """Out of repair mode: writes what was never sent, as the application would; then sets the options."""
    if state.unsent_bytes:
        repair.push(sock, state.unsent_after(state.send_start + repair.written_bytes(sock)))
    for name, force, filled in (
        ("receive_buffer_bytes", SO_RCVBUFFORCE, state.receive),
        ("send_buffer_bytes", SO_SNDBUFFORCE, state.send),
    ):
        if filled:
            sock.setsockopt(SOL, force, state.options[name] // 2)
    for name in _SET_LAST:
        socket_state.put_option(sock, state, name)
