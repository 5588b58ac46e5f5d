"""How the processes of a lab are found and ended: by cgroup and by namespace, never by name.

Invariant: a signal goes through a pidfd whose process was checked after the pidfd was opened, so it never reaches a
process that merely has the number of an earlier one. The caller and its ancestors are never ended.
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
from migrator.lab.layout import Held
from snapshotd.api.errors import Timeout
from snapshotd.proc import stat


def alive(held: Held) -> bool:
    return start_ticks(held.pid) == held.start_ticks


def send(held: Held, number: int) -> bool:
    """Sends a signal to exactly that process. False if it is gone."""
    try:
        pidfd = os.pidfd_open(held.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(held):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def wait(held: Held, timeout_s: float) -> bool:
    """Whether that process ends within the time. It need not be a child."""
    try:
        pidfd = os.pidfd_open(held.pid)
    except ProcessLookupError:
        return True
    try:
        if not alive(held):
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def wait_stopped(held: Held, timeout_s: float) -> bool:
    """Whether SIGSTOP has taken effect on every thread within the time: sending it only announces it."""
    deadline = time.monotonic() + timeout_s
    while alive(held):
        if {thread.state for thread in stat.read_threads(held.pid)} == {"T"}:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return False


def namespaces(pid: int, kinds: Iterable[str] = ("net", "mnt", "uts")) -> dict[str, str]:
    """The process's namespaces as the kernel names them; empty when it is gone."""
    try:
        return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in kinds}
    except OSError:
        return {}


def in_cgroup(cgroup: Path) -> set[int]:
    """The processes in a cgroup and all below it."""
    found: set[int] = set()
    for folder, _, _ in os.walk(cgroup):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            found.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
    return found


def in_node(marker: str, nets: set[str]) -> set[int]:
    """The processes whose file system has the folder that only nodes of this lab have, or whose network is in `nets`.

    The kernel gives the number of a namespace that is gone to the next one: `nets` must be of living processes.
    """
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if namespaces(pid, ("net",)).get("net") in nets or Path(f"/proc/{pid}/root{marker}").is_dir():
                found.add(pid)
    return found


def resident(held: Held, cgroup: Path) -> Held | None:
    """`held`, or where it was killed any other process of that cgroup in its namespaces; None if they are gone."""
    if alive(held):
        return held
    for pid in in_cgroup(cgroup):
        ticks = start_ticks(pid)
        if ticks is not None and namespaces(pid, held.namespaces) == held.namespaces:
            return Held(pid, ticks, held.namespaces)
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


def end_all(cgroup: Path, marker: str, holders: Iterable[Held], timeout_s: float) -> None:
    """Ends every process in the cgroup or in the nodes, frozen ones too, and removes the cgroups. Idempotent.

    A process that left the cgroup is found by the node's file system, or by the network of a holder that lives.
    """
    deadline = time.monotonic() + timeout_s
    spared = own_line()
    nets = {held.namespaces["net"] for held in holders if alive(held)}
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
            with contextlib.suppress(OSError):  # before Linux 5.14 there is none, and one by one does it too
                (cgroup / "cgroup.kill").write_text("1")
        for pid in victims:
            ticks = start_ticks(pid)
            if ticks is not None:
                send(Held(pid, ticks), signal.SIGKILL)
        _await_end(victims, deadline)


def _await_end(pids: set[int], deadline: float) -> None:
    """Until all have ended, but at most a moment: new ones may have been started, so the caller looks again."""
    moment = min(deadline, time.monotonic() + 0.5)
    for pid in pids:
        ticks = start_ticks(pid)
        if ticks is not None:
            wait(Held(pid, ticks), max(0.0, moment - time.monotonic()))
    if not pids:
        time.sleep(0.01)  # only the kernel is still busy, giving back the cgroup


def _remove(cgroup: Path) -> bool:
    """Removes the empty cgroup with all below it. False while something is in it."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
