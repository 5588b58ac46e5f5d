"""Finds and ends the processes of a lab, by cgroup and by namespace, never by name.

Invariant: a signal is sent through a pidfd whose process was checked after the pidfd was opened, so it never reaches a
process that reuses the pid. The caller and its ancestors are never ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from migrator.lab.inside import start_ticks
from migrator.lab.layout import LabProcess
from snapshotd.api.errors import Timeout
from snapshotd.proc import stat
from snapshotd.proc.pidfd import open_pidfd


def alive(process: LabProcess) -> bool:
    return start_ticks(process.pid) == process.start_ticks


def send(process: LabProcess, number: int) -> bool:
    """Sends a signal to exactly that process. Returns False if it has ended."""
    try:
        pidfd = open_pidfd(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def wait(process: LabProcess, timeout_s: float) -> bool:
    """Whether that process ends within the time. It need not be a child."""
    try:
        pidfd = open_pidfd(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not alive(process):
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def wait_stopped(process: LabProcess, timeout_s: float) -> bool:
    """Whether SIGSTOP takes effect on every thread within the time. Sending the signal does not wait for that."""
    deadline = time.monotonic() + timeout_s
    while alive(process):
        if {thread.state for thread in stat.read_threads(process.pid)} == {"T"}:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return False


def namespaces(pid: int, kinds: Iterable[str] = ("net", "mnt", "uts")) -> dict[str, str]:
    """The process's namespaces as the kernel names them; empty if it has ended."""
    try:
        return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in kinds}
    except OSError:
        return {}


def in_cgroup(cgroup: Path) -> set[int]:
    """The processes in a cgroup and in all its descendants."""
    found: set[int] = set()
    for folder, _, _ in os.walk(cgroup):
        with contextlib.suppress(OSError):  # it was removed in the meantime
            found.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
    return found


def in_node(marker: str, nets: set[str]) -> set[int]:
    """The processes whose file system has the marker directory of this lab's nodes, or whose network is in `nets`.

    The kernel reuses the numbers of namespaces, so `nets` must be those of running processes.
    """
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # it has ended in the meantime
            if namespaces(pid, ("net",)).get("net") in nets or Path(f"/proc/{pid}/root{marker}").is_dir():
                found.add(pid)
    return found


def resident(process: LabProcess, cgroup: Path) -> LabProcess | None:
    """`process`, or if it has ended, another process of that cgroup in the same namespaces; None if there is none."""
    if alive(process):
        return process
    for pid in in_cgroup(cgroup):
        ticks = start_ticks(pid)
        if ticks is not None and namespaces(pid, process.namespaces) == process.namespaces:
            return LabProcess(pid, ticks, process.namespaces)
    return None


def own_line() -> set[int]:
    """This process and its ancestors."""
    line, pid = set(), os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        try:
            pid = stat.read(pid).parent
        except ProcessLookupError:
            break
    return line


def end_all(cgroup: Path, marker: str, holders: Iterable[LabProcess], timeout_s: float) -> None:
    """Ends every process in the cgroup or in the nodes, including frozen ones, and removes the cgroups. Idempotent.

    A process that left the cgroup is found by the node's file system, or by the network of a holder that still runs.
    """
    deadline = time.monotonic() + timeout_s
    spared = own_line()
    nets = {process.namespaces["net"] for process in holders if alive(process)}
    while True:
        members = in_cgroup(cgroup)
        victims = {pid for pid in members | in_node(marker, nets) if start_ticks(pid) is not None} - spared
        if not victims and _remove(cgroup):
            return
        if time.monotonic() > deadline:
            left = ", ".join(map(str, sorted(victims))) or "none"
            raise Timeout(
                f"the lab could not be ended in {timeout_s:.0f} s: processes left: {left}; cgroup {cgroup}",
                remedy="see what they wait for (cat /proc/PID/stack), then `migrator lab down` again",
            )
        if not members & spared:
            with contextlib.suppress(OSError):  # not before Linux 5.14; the loop below does the same
                (cgroup / "cgroup.kill").write_text("1")
        for pid in victims:
            ticks = start_ticks(pid)
            if ticks is not None:
                send(LabProcess(pid, ticks), signal.SIGKILL)
        _await_end(victims, deadline)


def _await_end(pids: set[int], deadline: float) -> None:
    """Waits until all have ended, at most 0.5 s. The caller then looks again, because new ones may have been started."""
    moment = min(deadline, time.monotonic() + 0.5)
    for pid in pids:
        ticks = start_ticks(pid)
        if ticks is not None:
            wait(LabProcess(pid, ticks), max(0.0, moment - time.monotonic()))
    if not pids:
        time.sleep(0.01)  # the kernel still has to release the cgroup


def _remove(cgroup: Path) -> bool:
    """Removes the empty cgroup and its descendants. Returns False if a process is still in it."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
