"""Re-points a live TCP connection of another process to other addresses, in place.

The process keeps its descriptor, its inode and its epoll registrations. Queued bytes of both directions, sequence numbers and
negotiated options stay. The process can notice only by asking for the addresses. It is stopped for a fraction of a
millisecond per connection, and a packet filter (snapshotd/net/filter.py) holds the old and the new 4-tuple from before the
re-point until the peer's socket has been changed too.

Invariant: a process that can run has no socket that is in repair mode or partly filled. Whatever a crash left, a
repeated call brings a socket to the wanted endpoints, and no byte is lost: what is taken off a socket is saved first
(snapshotd/net/socket_state.py). A socket that cannot be re-pointed is put back. If even that fails, its process stays
stopped.

Undo is the same call with the old addresses.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import Internal, Refused, SnapshotError, Where
from snapshotd.net import binding, repair, socket_state, sockets
from snapshotd.net.flows import Address, BadAddress, Flow, Holder, Pair
from snapshotd.net.rebuild import complete, leave, rebuild
from snapshotd.net.socket_state import SocketState, Stage
from snapshotd.net.sockets import borrow_from, inode_of
from snapshotd.net.stop_holders import Pause
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Change:
    """One socket and the endpoints it is to have. `state_path` stays the same for a socket until the move is settled."""

    holders: tuple[Holder, ...]
    inode: int
    local: Address
    remote: Address
    state_path: Path

    @property
    def endpoints(self) -> Pair:
        return self.local, self.remote

    def __str__(self) -> str:
        return f"{self.local} – {self.remote} of process {', '.join(str(holder.pid) for holder in self.holders)}"


def repoint_all(changes: Iterable[Change]) -> float:
    """Re-points every socket; returns for how many seconds its processes were stopped. Blocks. Idempotent.

    A socket that its processes have closed, or whose connection is dead, is skipped. Raises Refused if one cannot be
    re-pointed: it then has its former endpoints, while others may have the new ones, so undo. Any other error means that
    one could be given neither: its process stays stopped, and the next call tries again.
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
            pause.keep_stopped(_processes(works))  # in case of an unexpected exception
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
    """Keeps a socket's failure for the end: the other sockets must be re-pointed nevertheless."""
    try:
        yield
    except SnapshotError as error:
        log.error("%s: %s", change, error.message)
        failures.append(error)
    except (OSError, BadAddress) as error:
        log.error("%s: %s", change, error)
        failures.append(Refused(f"{change} cannot be re-pointed: {error}", where=Where.UNKNOWN))


class _Work:
    """One socket. Everything that can be done while its processes run is outside `do`."""

    def __init__(self, change: Change, sock: socket.socket) -> None:
        self.change = change
        self.sock = sock
        self.pending = False  # must it be changed, and its processes be stopped for that?
        self.whole = False  # may its processes run?
        self._known: SocketState | None = None
        self._taken: SocketState | None = None

    def prepare(self) -> None:
        """Determines what to do. Raises Refused with nothing changed; another error if the socket may not be working."""
        self._known = socket_state.load(self.change.state_path)
        if self._interrupted():
            self.pending = True
            return
        self.whole = True
        if self._wanted():
            socket_state.save(self.change.state_path, socket_state.begin(self.sock))
            self.pending = True

    def do(self) -> None:
        """Its processes are stopped. Raises Refused with the socket unchanged, another error with the socket not working."""
        if self._interrupted():
            self._recover()
        self.whole = True
        if not self._wanted():
            return
        begun = socket_state.begin(self.sock)
        repair.enter(self.sock)
        try:
            taken = socket_state.capture(self.sock, begun)
            socket_state.save(self.change.state_path, taken)
        except BaseException:
            leave(self.sock, begun)
            raise
        self.whole = False
        self._rebuild_or_put_back(taken)

    def note_whole(self) -> None:
        """Marks the saved bytes as obsolete; the processes may run already. If this fails, the next call detects it."""
        if self.whole and self._taken is not None:
            try:
                socket_state.save(self.change.state_path, self._taken.options_alone())
            except OSError as error:
                log.warning("%s: %s", self.change, error)

    def _interrupted(self) -> bool:
        return (self._known is not None and self._known.stage is Stage.TAKEN) or repair.in_repair(self.sock)

    def _wanted(self) -> bool:
        """Whether a working socket has to be re-pointed."""
        endpoints, state = repair.pair(self.sock), repair.info(self.sock).state
        if endpoints == self.change.endpoints:
            return False
        if endpoints is not None and state == repair.ESTABLISHED:
            binding.check(self.sock, self.change.endpoints)
            return True
        if endpoints is not None and self._known is None:
            raise Refused(f"{endpoints[0]} – {endpoints[1]} is half closed (state {state})", where=Where.UNKNOWN)
        log.warning("%s: its processes have closed the connection in the meantime (state %d)", self.change, state)
        return False

    def _recover(self) -> None:
        """After a crash: makes the socket a working connection again, with the old or the new endpoints."""
        known = self._known
        if known is None or known.stage is not Stage.TAKEN:
            leave(self.sock, known)
        elif repair.in_repair(self.sock):
            self._rebuild_or_put_back(known)
        else:
            # Out of repair mode it is connected and has its sent bytes in its queue, or its own processes closed it.
            self._taken = known
            if repair.pair(self.sock) is not None:
                complete(self.sock, known)
        self._known = self._taken

    def _rebuild_or_put_back(self, taken: SocketState) -> None:
        self._taken = taken
        try:
            rebuild(self.sock, taken, self.change.endpoints)
        except OSError as error:
            try:
                rebuild(self.sock, taken, taken.endpoints)
            except OSError as second:
                raise Internal(
                    f"{self.change} cannot be re-pointed: {error}; it cannot be put back either: {second}",
                    where=Where.UNKNOWN,
                ) from error
            self.whole = True
            raise Refused(f"{self.change} cannot be re-pointed: {error}", where=Where.UNKNOWN) from error
        self.whole = True


# ---------------------------------------------------------------- all sockets of a copy of a rank


def silence(pids: Iterable[int]) -> int:
    """Puts every connection of a frozen copy into repair mode, so that killing it sends no packet; returns their number.

    A listener cannot be silenced: its connections that were not accepted yet are reset when it closes, unless filtered.
    """
    return _for_each_connection(pids, repair.enter)


def with_reuse_address(flows: Iterable[Flow]) -> list[int]:
    """The inodes of the connections among these that have SO_REUSEADDR, read before criu takes them into repair mode."""
    found = []
    for flow in flows:
        sock = borrow_from(flow.holders, flow.inode) if flow.protocol == "tcp" and not flow.listens else None
        if sock is not None:
            with sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                    found.append(flow.inode)
    return found


def end_repair(pids: Iterable[int], reuse_address: Collection[int]) -> int:
    """Takes every connection that a killed criu left in repair mode out of it, silently; returns their number.

    The connections `reuse_address` get SO_REUSEADDR again. The kernel resets it with repair mode, and criu may have been
    killed between the two. Without it a job that is restarted cannot listen on the port of these connections.
    """
    reuse = frozenset(reuse_address)

    def end(sock: socket.socket) -> bool:
        found = repair.in_repair(sock)
        if found:
            repair.leave(sock, 0)
        if inode_of(sock) in reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return found

    return _for_each_connection(pids, end)


def _for_each_connection(pids: Iterable[int], act: Callable[[socket.socket], bool | None]) -> int:
    """Calls act(socket) for every TCP socket of these processes except listeners; counts calls that did not return False."""
    count = 0
    for flow in sockets.tree_flows(pids):
        sock = borrow_from(flow.holders, flow.inode) if flow.protocol == "tcp" and not flow.listens else None
        if sock is not None:
            with sock:
                count += act(sock) is not False
    return count
