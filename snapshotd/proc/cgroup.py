"""The rank's own cgroup (v2): what is in it is the rank, and its freezer keeps a frozen copy from running.

Invariant: a rank's cgroup holds the rank's tree and nothing else (while criu works, also criu's parasite threads, which
are the rank's). The freezer belongs to the kernel, so it holds whoever dies: daemon, keeper or criu.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

from snapshotd.api.errors import Internal, Timeout, Where
from snapshotd.proc.tree import PidList


def mount_point() -> Path:
    """Where cgroup2 is mounted: /sys/fs/cgroup, or …/unified under a hybrid hierarchy."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] == "cgroup2":
            return Path(left.split()[4])
    raise Internal("no cgroup2 is mounted", remedy="mount it: mount -t cgroup2 none /sys/fs/cgroup")


def of_process(pid: int) -> Path:
    """The cgroup2 folder of a process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return mount_point() / line[3:].lstrip("/")
    raise Internal(f"process {pid} is in no cgroup2")


def for_guests() -> Path:
    """Where this daemon puts ranks that came from elsewhere, and criu: beside the daemon's own cgroup, never in it."""
    own = of_process(os.getpid())
    return (own.parent if own != mount_point() else own) / "snapshotd-ranks"


class Cgroup(PidList):
    """One cgroup2 folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> Cgroup:
        self.path.mkdir(parents=True, exist_ok=True)
        return self

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        try:
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        except (FileNotFoundError, OSError):
            return []

    def exists(self) -> bool:
        return self.path.is_dir()

    def _event(self, name: str) -> bool:
        try:
            words = (self.path / "cgroup.events").read_text().split()
        except (FileNotFoundError, OSError):
            return False
        return dict(zip(words[::2], words[1::2], strict=True)).get(name) == "1"

    def frozen(self) -> bool:
        return self._event("frozen")

    def freeze(self, deadline_s: float) -> None:
        """Freezes and waits until the kernel says `frozen 1` (the write alone is asynchronous). Blocking."""
        (self.path / "cgroup.freeze").write_text("1")
        self._await("frozen", True, deadline_s)

    def thaw(self, deadline_s: float) -> None:
        """Thaws and waits until it is. A group that is gone, or goes meanwhile, has nothing to thaw. Blocking."""
        try:
            (self.path / "cgroup.freeze").write_text("0")
            self._await("frozen", False, deadline_s)
        except OSError:
            if self.exists():
                raise

    def kill(self, deadline_s: float) -> None:
        """SIGKILL to everything in it, frozen or not, and waits until it is empty. Blocking."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "cgroup.kill").write_text("1")
            self._await("populated", False, deadline_s)

    def remove(self) -> None:
        """Removes the empty folder and empty folders below it; one that is not empty stays."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                return

    def _await(self, name: str, wanted: bool, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        poll = select.poll()
        try:
            with open(self.path / "cgroup.events") as events:
                poll.register(events, select.POLLPRI | select.POLLERR)
                while self._event(name) is not wanted:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise Timeout(
                            f"cgroup {self.path.name} did not become {'' if wanted else 'un'}{name} in {deadline_s:.0f} s",
                            where=Where.UNKNOWN,
                        )
                    poll.poll(min(left_s, 0.1) * 1000)
                    events.seek(0)
                    events.read()
        except OSError:  # somebody removed it meanwhile: nothing is in it, and nothing is frozen
            if wanted:
                raise
