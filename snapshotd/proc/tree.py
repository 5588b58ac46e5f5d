"""Processes by (pid, start time), their tree, and stopping and continuing all of it.

Invariant: a pid is used only together with its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import RankGone, Timeout, Where


@dataclass(frozen=True, order=True)
class Process:
    """A process that cannot be mistaken for another: its pid here, and when it started."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has `pid` now. Raises ProcessLookupError when there is none."""
        return cls(pid, int(_stat(pid)[19]))

    def alive(self) -> bool:
        """Whether this very process exists and is no zombie."""
        try:
            fields = _stat(self.pid)
        except ProcessLookupError:
            return False
        return int(fields[19]) == self.start_ticks and fields[0] not in "ZXx"

    def signal(self, number: int) -> bool:
        """Sends a signal to this process and no other. False when it no longer exists."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if int(_stat(self.pid)[19]) != self.start_ticks:
                return False
            signal.pidfd_send_signal(pidfd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name: [0] is the state, [1] the parent, [19] the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid}") from error


def state(pid: int) -> str:
    """The one-letter state of a process, "" when it is gone."""
    try:
        return _stat(pid)[0]
    except ProcessLookupError:
        return ""


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def inner_pid(pid: int) -> int:
    """The pid of a process in its own, innermost pid namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def children(pid: int) -> list[int]:
    """Direct children, in the caller's pid namespace."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def find_child(parent_pid: int, inner: int, patience_s: float = 0.0) -> Process:
    """The child of `parent_pid` that is called `inner` in its own pid namespace. The kernel's list of children can miss one
    while others come and go: whoever knows that it exists has patience, in a thread."""
    deadline = time.monotonic() + patience_s
    while True:
        for child in children(parent_pid):
            try:
                if inner_pid(child) == inner:
                    return Process.of(child)
            except (FileNotFoundError, ProcessLookupError):
                continue
        if time.monotonic() > deadline or not os.path.exists(f"/proc/{parent_pid}"):
            raise RankGone(f"process {inner} is not there under its keeper (pid {parent_pid})", where=Where.UNKNOWN)
        time.sleep(0.005)


def threads_states(pid: int) -> list[str]:
    """The state letter of every thread of a process."""
    states = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                states.append(Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue
    except (FileNotFoundError, ProcessLookupError):
        pass
    return states


def stopped(pid: int) -> bool:
    """Whether no thread of the process can run user code: stopped, or dead."""
    return all(letter in "TtZXx" for letter in threads_states(pid))


class PidList:
    """Anything that can list the pids of a rank; the rank's cgroup is one."""

    def pids(self) -> list[int]:
        raise NotImplementedError


def stop_all(group: PidList, deadline_s: float) -> None:
    """SIGSTOP to every process of the group until all are stopped. Blocking; run it in a thread.

    Raises Timeout, with everything continued again, when one does not stop in time: a process in uninterruptible sleep,
    or a parent that waits in vfork for a child we have stopped; the latter is why a stuck round is let go and repeated.
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
        stuck = [f"{pid} ({_name(pid)}, state {state(pid)})" for pid in group.pids() if not stopped(pid)]
        continue_all(group.pids())
        if time.monotonic() >= deadline:
            raise Timeout(
                f"these processes do not stop: {', '.join(stuck)}",
                remedy="a process in state D waits for a device or a network file system; try again when that answers",
                where=Where.SOURCE_RUNNING,
            )
        time.sleep(0.05)


def stop_again(processes: Iterable[Process], deadline_s: float) -> None:
    """SIGSTOP to these of a tree whose others are stopped already; unlike `stop_all` it never continues anything, since of a
    held copy nothing may run. Blocking. Raises Timeout when one does not stop in time."""
    deadline, left = time.monotonic() + deadline_s, list(processes)
    while left := [process for process in left if process.alive() and not stopped(process.pid)]:
        if time.monotonic() > deadline:
            raise Timeout(
                f"process {left[0].pid} ({_name(left[0].pid)}, state {state(left[0].pid)}) does not stop",
                remedy="a process in state D waits for a device or a network file system; try again when that answers",
                where=Where.SOURCE_FROZEN,
            )
        for process in left:
            process.signal(signal.SIGSTOP)
        time.sleep(0.001)


def continue_all(pids: Iterable[int], leave_stopped: Iterable[int] = ()) -> None:
    """SIGCONT to every process but those that were stopped before we came (`leave_stopped`: inner pids)."""
    keep = set(leave_stopped)
    for pid in pids:
        try:
            if keep and inner_pid(pid) in keep:
                continue
        except (FileNotFoundError, ProcessLookupError):
            continue
        _kill(pid, signal.SIGCONT)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
