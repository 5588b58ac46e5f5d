"""Re-points a live TCP connection of another process at other addresses, in place.

The process keeps its descriptor, its inode and its epoll registrations; queued bytes of both directions, sequence numbers and
what was negotiated stay; it can tell only by asking for the addresses. It is stopped meanwhile, a fraction of a millisecond
per connection, and a packet filter (snapshotd/net/filter.py) holds the old and the new 4-tuple from before until the other
end is there too.

Invariant: a process that can run has no socket in repair mode or half filled. A socket is brought to the wished ends from
whatever a crash left, as often as asked, and no byte is lost: what was taken off a socket is on storage first
(snapshotd/net/capture.py). When it cannot be brought there, it is put back; where even that fails its process stays stopped.

Undo is the same call with the old addresses.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from snapshotd.api.errors import Internal, Refused, SnapshotError, Where
from snapshotd.net import binding, capture, repair, sockets
from snapshotd.net.borrow import borrow_from
from snapshotd.net.capture import SocketState, Stage
from snapshotd.net.flows import Address, BadAddress, Holder, Pair
from snapshotd.net.pause import Pause
from snapshotd.net.repair import RECV_QUEUE, SEND_QUEUE, SOL, TCP

log = logging.getLogger(__name__)

#: The first retransmission after a re-point. The kernel's own choice, 200 ms at least, would be most of a short pause.
#: It applies where the kernel knows the round trip (snapshotd/net/timers.py), and until it has measured it anew.
FIRST_RTO_MIN_US = 10_000
STOP_TIMEOUT_S = 5.0
_ROOM_BYTES = 1 << 20

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33


@dataclass(frozen=True)
class Change:
    """One socket, and the two ends it shall have. The same `state_path` for the same socket, until the move is settled."""

    holders: tuple[Holder, ...]
    inode: int
    local: Address
    remote: Address
    state_path: Path

    @property
    def ends(self) -> Pair:
        return self.local, self.remote

    def __str__(self) -> str:
        return f"{self.local} – {self.remote} of process {', '.join(str(holder.pid) for holder in self.holders)}"


def repoint_all(changes: Iterable[Change]) -> float:
    """Every socket to its wished ends; answers for how many seconds its processes were stopped. Blocking, repeatable.

    A socket that its processes have closed, or that died, is passed over: there is nothing left to re-point. Raises Refused
    when one cannot be re-pointed: it has its former ends then, the others may have the new ones: undo. Any other error means
    that one could be brought to neither: its process stays stopped, and the next call tries again.
    """
    failures: list[SnapshotError] = []
    with contextlib.ExitStack() as borrowed:
        works: list[_Work] = []
        for change in changes:
            with _collected(failures):
                if (sock := borrow_from(change.holders, change.inode)) is not None:
                    work = _Work(change, borrowed.enter_context(sock))
                    if work.prepare():
                        works.append(work)
        if works:
            _with_all_stopped(works, failures, pause := _pause(works))
            stopped_s = pause.seconds
        else:
            stopped_s = 0.0
    for failure in failures:
        log.error("%s", failure.message)
    if failures:
        raise next((failure for failure in failures if not isinstance(failure, Refused)), failures[0])
    return stopped_s
# ---------------------------------------------------------------- the recipe


def _rebuild(sock: socket.socket, state: SocketState, ends: Pair) -> None:
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
        raise OSError(errno.EADDRNOTAVAIL, f"it is bound to another address than {local.ip}")
    repair.set_negotiated(sock, state.info, state.mss)
    if remote.version == 4:
        repair.use_full_mss(sock)
    if state.info.options & repair.HAS_TIMESTAMP:
        sock.setsockopt(TCP, repair.TCP_TIMESTAMP, struct.pack("I", state.timestamp))
    repair.fill(sock, RECV_QUEUE, state.receive)
    repair.fill(sock, SEND_QUEUE, state.sent)
    (state.window if remote.version == 4 else state.window.eager()).put(sock)
    if not capture.agrees(sock, replace(state, send=state.sent, send_end=state.send_end - state.unsent_bytes)):
        raise OSError(errno.EIO, "the queues were not filled as they should be")
    _leave(sock, state)
    _complete(sock, state)


def _make_room(sock: socket.socket, state: SocketState) -> None:
    """Queues that the application filled by and by take more memory when they are filled at once."""
    if state.receive:
        sock.setsockopt(SOL, SO_RCVBUFFORCE, len(state.receive) * 2 + _ROOM_BYTES)
    if state.send:
        sock.setsockopt(SOL, SO_SNDBUFFORCE, len(state.send) * 2 + _ROOM_BYTES)


def _leave(sock: socket.socket, state: SocketState) -> None:
    repair.leave(sock, state.options.get("reuse_address", 0))


def _complete(sock: socket.socket, state: SocketState) -> None:
    """Out of repair mode: what was never sent goes into the queue as the application would put it; then the options."""
    if state.unsent_bytes:
        repair.enter(sock)
        reached = repair.sequence(sock, SEND_QUEUE)
        _leave(sock, state)
        repair.push(sock, state.unsent_after(reached))
    for name, force, filled in (
        ("receive_buffer_bytes", SO_RCVBUFFORCE, state.receive),
        ("send_buffer_bytes", SO_SNDBUFFORCE, state.send),
    ):
        if filled:
            sock.setsockopt(SOL, force, state.options[name] // 2)
    for name in ("reuse_address", "buffer_lock", "window_clamp", "rto_min_us", "delayed_ack_max_us", "peek_offset"):
        capture.put_option(sock, state, name)


def _only_options(state: SocketState) -> SocketState:
    return replace(state, stage=Stage.WHOLE, receive=b"", send=b"", unsent_bytes=0)


# ---------------------------------------------------------------- the sockets of a whole copy


def silence(pids: Iterable[int]) -> int:
    """Every connection of a frozen copy into repair mode, so that killing it tells nobody; answers how many.

    A listener cannot be silenced: connections at it that nobody accepted are reset when it closes, unless filtered.
    """
    return _for_each_connection(pids, repair.enter)


def end_repair(pids: Iterable[int]) -> int:
    """Out of repair mode, silently, with every connection that a killed criu left in it; answers how many there were.

    SO_REUSEADDR is off afterwards: what it was before criu came, nobody knows any more.
    """

    def end(sock: socket.socket) -> bool:
        found = repair.in_repair(sock)
        if found:
            repair.leave(sock, 0)
        return found

    return _for_each_connection(pids, end)


def _for_each_connection(pids: Iterable[int], act: Callable[[socket.socket], bool | None]) -> int:
    """act(socket) once for every TCP socket of these processes that is no listener; counts those it did not deny."""
    count = 0
    for flow in sockets.tree_flows(pids):
        sock = borrow_from(flow.holders, flow.inode) if flow.protocol == "tcp" and not flow.listens else None
        if sock is not None:
            with sock:
                count += act(sock) is not False
    return count
