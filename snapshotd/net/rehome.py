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

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import Internal, Refused, SnapshotError, Where
from snapshotd.net import binding, capture, repair, sockets
from snapshotd.net.borrow import borrow_from
from snapshotd.net.capture import SocketState, Stage
from snapshotd.net.flows import Address, BadAddress, Holder, Pair
from snapshotd.net.pause import Pause
from snapshotd.net.rebuild import complete, leave, rebuild
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


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
    todo = list(changes)
    if not todo:
        return 0.0
    failures: list[SnapshotError] = []
    with contextlib.ExitStack() as borrowed:
        works: list[_Work] = []
        for change in todo:
            sock = borrow_from(change.holders, change.inode)
            if sock is not None:
                works.append(_Work(change, borrowed.enter_context(sock)))
                with _collecting(failures, change):
                    works[-1].prepare()
        pause = Pause(todo[0].state_path.with_name("stopped.json"), _processes(work for work in works if work.pending))
        with pause.stopped(STOP_TIMEOUT_S):
            pause.keep_stopped(_processes(works))  # should something happen that nobody thought of
            for work in works:
                if work.pending:
                    with _collecting(failures, work.change):
                        work.do()
            pause.let_go(_processes(works) - _processes(work for work in works if not work.whole))
        for work in works:
            work.note_whole()
    if failures:
        raise next((failure for failure in failures if not isinstance(failure, Refused)), failures[0])
    return pause.seconds


def _processes(works: Iterable[_Work]) -> set[Process]:
    return {holder.process for work in works for holder in work.change.holders}


@contextlib.contextmanager
def _collecting(failures: list[SnapshotError], change: Change) -> Iterator[None]:
    """One socket's failure is kept for the end: the others have to be brought where they belong all the same."""
    try:
        yield
    except SnapshotError as error:
        log.error("%s: %s", change, error.message)
        failures.append(error)
    except (OSError, BadAddress) as error:
        log.error("%s: %s", change, error)
        failures.append(Refused(f"{change} cannot be re-pointed: {error}", where=Where.UNKNOWN))


class _Work:
    """One socket on its way. Everything that can be done while its processes run is outside `do`."""

    def __init__(self, change: Change, sock: socket.socket) -> None:
        self.change = change
        self.sock = sock
        self.pending = False  # has it to be changed, and its processes to be stopped for that?
        self.whole = False  # may its processes run?
        self._known: SocketState | None = None
        self._taken: SocketState | None = None

    def prepare(self) -> None:
        """Finds out what there is to do. Raises Refused, nothing touched; another error when the socket may not be whole."""
        self._known = capture.load(self.change.state_path)
        if self._interrupted():
            self.pending = True
            return
        self.whole = True
        if self._wanted():
            capture.save(self.change.state_path, capture.begin(self.sock))
            self.pending = True

    def do(self) -> None:
        """Its processes are stopped. Raises Refused with the socket as it was, another error with the socket not whole."""
        if self._interrupted():
            self._recover()
        self.whole = True
        if not self._wanted():
            return
        begun = capture.begin(self.sock)
        repair.enter(self.sock)
        try:
            taken = capture.capture(self.sock, begun)
            capture.save(self.change.state_path, taken)
        except BaseException:
            leave(self.sock, begun)
            raise
        self.whole = False
        self._rebuild_or_put_back(taken)

    def note_whole(self) -> None:
        """The bytes in the file are history; its processes may run already. Where it fails, they are found to be history."""
        if self.whole and self._taken is not None:
            try:
                capture.save(self.change.state_path, self._taken.options_alone())
            except OSError as error:
                log.warning("%s: %s", self.change, error)

    def _interrupted(self) -> bool:
        return (self._known is not None and self._known.stage is Stage.TAKEN) or repair.in_repair(self.sock)

    def _wanted(self) -> bool:
        """Whether a socket in working order has to be re-pointed."""
        ends, state = repair.pair(self.sock), repair.info(self.sock).state
        if ends == self.change.ends:
            return False
        if ends is not None and state == repair.ESTABLISHED:
            binding.check(self.sock, self.change.ends)
            return True
        if ends is not None and self._known is None:
            raise Refused(f"{ends[0]} – {ends[1]} is half closed (state {state})", where=Where.UNKNOWN)
        log.warning("%s: its processes have ended the connection meanwhile (state %d)", self.change, state)
        return False

    def _recover(self) -> None:
        """A crash left the socket somewhere on the way: makes it a working connection again, with whichever ends."""
        known = self._known
        if known is None or known.stage is not Stage.TAKEN:
            leave(self.sock, known)
        elif repair.in_repair(self.sock):
            self._rebuild_or_put_back(known)
        else:
            # Out of repair mode it is connected and what had been sent is in its queue, or its own processes ended it.
            self._taken = known
            if repair.pair(self.sock) is not None:
                complete(self.sock, known)
        self._known = self._taken

    def _rebuild_or_put_back(self, taken: SocketState) -> None:
        self._taken = taken
        try:
            rebuild(self.sock, taken, self.change.ends)
        except OSError as error:
            try:
                rebuild(self.sock, taken, taken.ends)
            except OSError as second:
                raise Internal(
                    f"{self.change}: {error}; nor can it be put back: {second}", where=Where.UNKNOWN
                ) from error
            self.whole = True
            raise Refused(f"{self.change} cannot be re-pointed: {error}", where=Where.UNKNOWN) from error
        self.whole = True


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
