"""Makes a socket a connection again, from its captured state alone: the recipe.

Invariant: until `rebuild` has filled both queues the socket is in repair mode; once it is not, all that is missing is what
the application had written but the kernel never sent, and some options. `complete` adds those, as often as asked.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import replace

from snapshotd.net import binding, capture, repair
from snapshotd.net.capture import SocketState
from snapshotd.net.flows import Pair
from snapshotd.net.repair import RECV_QUEUE, SEND_QUEUE, SOL, TCP

#: The first retransmission after a re-point. The kernel's own choice, 200 ms at least, would be most of a short pause.
#: It applies where the kernel knows the round trip (snapshotd/net/timers.py), and until it has measured it anew.
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


def rebuild(sock: socket.socket, state: SocketState, ends: Pair) -> None:
    """Whatever the socket is now: the connection of `state` with these ends, out of repair mode."""
    local, remote = ends
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
    sock.connect(repair.name_of(sock, remote))  # in repair mode no packet leaves
    if repair.pair(sock) != ends:
        raise OSError(errno.EADDRNOTAVAIL, f"routing gives it another address than {local.ip}")
    repair.set_negotiated(sock, state.info, state.mss)
    if remote.version == 4:
        repair.use_full_mss(sock)
    if state.info.options & repair.HAS_TIMESTAMP:
        sock.setsockopt(TCP, repair.TCP_TIMESTAMP, struct.pack("I", state.timestamp))
    repair.fill(sock, RECV_QUEUE, state.receive)
    repair.fill(sock, SEND_QUEUE, state.sent)
    (state.window if remote.version == 4 else state.window.eager()).put(sock)
    if not capture.agrees(sock, replace(state, send=state.sent, send_end=state.sent_end)):
        raise OSError(
            errno.EIO,
            f"the queues were not filled as they should be: {repair.waiting(sock, repair.SIOCINQ)} of {len(state.receive)} "
            f"bytes to read, {repair.waiting(sock, repair.SIOCOUTQ)} of {len(state.sent)} to send, ends at "
            f"{repair.sequence(sock, RECV_QUEUE)} for {state.receive_end} and {repair.sequence(sock, SEND_QUEUE)} for "
            f"{state.sent_end}",
        )
    leave(sock, state)
    complete(sock, state)


def _make_room(sock: socket.socket, state: SocketState) -> None:
    """Queues that the application filled by and by take more memory when they are filled at once."""
    if state.receive:
        sock.setsockopt(SOL, SO_RCVBUFFORCE, len(state.receive) * 2 + _ROOM_BYTES)
    if state.send:
        sock.setsockopt(SOL, SO_SNDBUFFORCE, len(state.send) * 2 + _ROOM_BYTES)


def leave(sock: socket.socket, state: SocketState | None) -> None:
    repair.leave(sock, state.options.get("reuse_address", 0) if state else 0)


def complete(sock: socket.socket, state: SocketState) -> None:
    """Out of repair mode: what was never sent goes into the queue as the application would put it; then the options."""
    if state.unsent_bytes:
        repair.push(sock, state.unsent_after(state.send_start + repair.written_bytes(sock)))
    for name, force, filled in (
        ("receive_buffer_bytes", SO_RCVBUFFORCE, state.receive),
        ("send_buffer_bytes", SO_SNDBUFFORCE, state.send),
    ):
        if filled:
            sock.setsockopt(SOL, force, state.options[name] // 2)
    for name in _SET_LAST:
        capture.put_option(sock, state, name)
