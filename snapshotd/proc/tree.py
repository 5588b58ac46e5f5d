"""Processes by (pid, start time), their tree, and stopping and continuing a whole tree.

Invariant: a signal goes only through a pidfd that was checked after it was opened: by the start time of the process, or by
the list of pids that it must be in. So a process that got the pid of another is never signalled. The rank's user decides when
its processes end, and so can try for such a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from snapshotd.api.errors import RankGone, Timeout, Where
from snapshotd.proc import comm, stat, status
from snapshotd.proc.files import GONE, read_text
from snapshotd.proc.pidfd import open_pidfd

_UNINTERRUPTIBLE = (
    "a process in state D waits for a device or a network file system; retry once that device or file system responds"
)
#: Of pidfd_open, since Linux 6.9: the pidfd is that of a thread.
_PIDFD_THREAD = os.O_EXCL
#: pidfds that are open at the same time: a rank can have more processes than a daemon may have files.
_BATCH = 256

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, order=True)
class Process:
    """A process that cannot be confused with another: its pid on this node, and when it started."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has `pid` now. Raises ProcessLookupError if there is none."""
        return cls(pid, stat.read(pid).start_ticks)

    def alive(self) -> bool:
        """Whether this very process exists and is not a zombie."""
        try:
            now = stat.read(self.pid)
        except ProcessLookupError:
            return False
        return now.start_ticks == self.start_ticks and not now.dead

    def goes_on(self, patience_s: float = 10.0) -> bool:
        """Whether it is alive and not about to end: waits for the end of a process that has begun to end, which has no memory
        left and is not a zombie yet. Blocks. For those who found its memory gone and ask why."""
        give_up = time.monotonic() + patience_s
        while self.alive() and stat.exiting(self.pid):
            if time.monotonic() > give_up:
                return False  # it still frees its memory, and runs none of its own code
            time.sleep(0.001)
        return self.alive()

    def signal(self, number: int) -> bool:
        """Sends a signal to this process and no other. False if it no longer exists."""
        try:
            with self.pidfd() as pidfd:
                signal.pidfd_send_signal(pidfd, number)
            return True
        except ProcessLookupError:
            return False

    def signal_thread(self, thread: int, number: int) -> bool:
        """Sends a signal to one thread of this process and to no other thread. False if it no longer exists.

        Linux before 6.9 has no pidfds of threads. There the thread and the process are checked immediately before the signal.
        """
        try:
            with self.pidfd() as process:
                try:
                    pidfd = os.pidfd_open(thread, _PIDFD_THREAD)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    pidfd = -1
                try:
                    # The thread is one of that process, and that process has not ended: so it is its thread.
                    os.stat(f"/proc/{self.pid}/task/{thread}")
                    signal.pidfd_send_signal(process, 0)
                    if pidfd != -1:
                        signal.pidfd_send_signal(pidfd, number)
                        return True
                    return _libc.tgkill(self.pid, thread, number) == 0 or ctypes.get_errno() != errno.ESRCH
                finally:
                    if pidfd != -1:
                        os.close(pidfd)
        except GONE:
            return False

    @contextlib.contextmanager
    def pidfd(self) -> Iterator[int]:
        """A pidfd of this process. Raises ProcessLookupError if it no longer exists."""
        pidfd = open_pidfd(self.pid)
        try:
            if stat.read(self.pid).start_ticks != self.start_ticks:
                raise ProcessLookupError(errno.ESRCH, f"pid {self.pid} belongs to another process now")
            yield pidfd
        finally:
            os.close(pidfd)


def state(pid: int) -> str:
    """The one-letter state of a process or thread, "" if it has ended."""
    try:
        return stat.read(pid).state
    except ProcessLookupError:
        return ""


def parent(pid: int) -> int:
    return stat.read(pid).parent


def inner_pid(pid: int) -> int:
    """The pid of a process, or the id of a thread, in its own, innermost pid namespace."""
    return status.read(pid).inner_pid


def children(pid: int) -> list[int]:
    """Direct children, numbered as in the caller's pid namespace."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, read_text(f"/proc/{pid}/task/{task}/children").split())
    except GONE:
        pass
    return found


def find_child(parent_pid: int, inner: int, patience_s: float = 0.0) -> Process:
    """The child of `parent_pid` whose pid is `inner` in its own pid namespace. Blocking; raises RankGone if there is none.

    The kernel's list of children can miss one while others start and end: a caller that knows that the child exists
    sets `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for child in children(parent_pid):
            try:
                if inner_pid(child) == inner:
                    return Process.of(child)
            except GONE:
                continue
        if time.monotonic() > deadline or not os.path.exists(f"/proc/{parent_pid}"):
            raise RankGone(f"the keeper (pid {parent_pid}) has no child with pid {inner}", where=Where.UNKNOWN)
        time.sleep(0.005)


def threads_states(pid: int) -> list[str]:
    """The state letter of every thread of a process."""
    return [thread.state for thread in stat.read_threads(pid)]


def stopped(pid: int) -> bool:
    """Whether no thread of the process can run user code: each is stopped or dead."""
    return all(thread.stopped for thread in stat.read_threads(pid))


class PidList:
    """Anything that can list the pids of a rank, such as the rank's cgroup."""

    def pids(self) -> list[int]:
        raise NotImplementedError


def stop_all(group: PidList, deadline_s: float) -> None:
    """Sends SIGSTOP to every process of the group until all are stopped. Blocking; run it in a thread.

    Raises Timeout, with everything continued again, if a process does not stop in time. Either it is in uninterruptible
    sleep, or it waits in vfork for a child that was stopped here. Because of the latter, after one second without
    success all are continued and the signals are sent again.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        round_ends = min(deadline, time.monotonic() + 1.0)
        while time.monotonic() < round_ends:
            pids = group.pids()
            signal_members(group, [pid for pid in pids if not stopped(pid)], signal.SIGSTOP)
            if all(stopped(pid) for pid in pids) and sorted(group.pids()) == sorted(pids):
                return
            time.sleep(0.001)
        stuck = [_described(pid) for pid in group.pids() if not stopped(pid)]
        continue_all(group)
        if time.monotonic() >= deadline:
            raise Timeout(
                f"these processes did not stop within {deadline_s:.0f} s of SIGSTOP: {', '.join(stuck)}",
                remedy=_UNINTERRUPTIBLE,
                where=Where.SOURCE_RUNNING,
            )
        time.sleep(0.05)


def stop_again(processes: Iterable[Process], deadline_s: float) -> None:
    """Sends SIGSTOP to some processes of a tree whose other processes are already stopped. Blocking.

    Unlike `stop_all` it never continues a process, because nothing of a held copy may run. Raises Timeout if one does
    not stop in time.
    """
    deadline, left = time.monotonic() + deadline_s, list(processes)
    while left := [process for process in left if process.alive() and not stopped(process.pid)]:
        if time.monotonic() > deadline:
            raise Timeout(
                f"process {_described(left[0].pid)} did not stop within {deadline_s:.0f} s of SIGSTOP",
                remedy=_UNINTERRUPTIBLE,
                where=Where.SOURCE_FROZEN,
            )
        for process in left:
            process.signal(signal.SIGSTOP)
        time.sleep(0.001)


def continue_all(group: PidList, leave_stopped: Iterable[int] = ()) -> None:
    """Sends SIGCONT to every process except those that were already stopped before the move (`leave_stopped`: inner pids)."""
    signal_members(group, group.pids(), signal.SIGCONT, leave_out=frozenset(leave_stopped))


def signal_members(group: PidList, pids: Iterable[int], number: int, leave_out: Collection[int] = frozenset()) -> None:
    """Sends a signal to those processes of `pids` that are in the group, except to those with an inner pid of `leave_out`.

    The list is read again after the pidfds were opened. A pidfd whose pid is in it is that of a member, or of a process that
    has ended meanwhile, which gets no signal.
    """
    wanted = list(pids)
    for begin in range(0, len(wanted), _BATCH):
        opened: dict[int, int] = {}
        try:
            for pid in wanted[begin : begin + _BATCH]:
                with contextlib.suppress(ProcessLookupError):
                    opened[pid] = open_pidfd(pid)
            members = set(group.pids())
            for pid, pidfd in opened.items():
                with contextlib.suppress(*GONE):
                    if pid in members and not (leave_out and inner_pid(pid) in leave_out):
                        signal.pidfd_send_signal(pidfd, number)
        finally:
            for pidfd in opened.values():
                os.close(pidfd)


def _described(pid: int) -> str:
    return f"{pid} ({comm.name_or(pid, 'ended')}, state {state(pid) or '-'})"
