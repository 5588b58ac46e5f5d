"""Processes by (pid, start time), their tree, and stopping and continuing a whole tree.

Invariant: a pid is used only together with its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from snapshotd.api.errors import RankGone, Timeout, Where
from snapshotd.proc import comm, stat, status
from snapshotd.proc.files import GONE, read_text

_UNINTERRUPTIBLE = (
    "a process in state D waits for a device or a network file system; retry once that device or file system responds"
)


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

    def signal(self, number: int) -> bool:
        """Sends a signal to this process and no other. False if it no longer exists."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if stat.read(self.pid).start_ticks != self.start_ticks:
                return False
            signal.pidfd_send_signal(pidfd, number)
            return True
        except ProcessLookupError:
            return False
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
            for pid in pids:
                if not stopped(pid):
                    _kill(pid, signal.SIGSTOP)
            if all(stopped(pid) for pid in pids) and sorted(group.pids()) == sorted(pids):
                return
            time.sleep(0.001)
        stuck = [_described(pid) for pid in group.pids() if not stopped(pid)]
        continue_all(group.pids())
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


def continue_all(pids: Iterable[int], leave_stopped: Iterable[int] = ()) -> None:
    """Sends SIGCONT to every process except those that were already stopped before the move (`leave_stopped`: inner pids)."""
    keep = set(leave_stopped)
    for pid in pids:
        try:
            if keep and inner_pid(pid) in keep:
                continue
        except GONE:
            continue
        _kill(pid, signal.SIGCONT)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _described(pid: int) -> str:
    return f"{pid} ({comm.name_or(pid, 'ended')}, state {state(pid) or '-'})"
