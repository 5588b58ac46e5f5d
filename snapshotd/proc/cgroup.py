"""A rank's own cgroup (v2): its processes are the rank, and its freezer keeps a frozen copy from running.

Invariant: a rank's cgroup contains the rank's process tree and nothing else (while criu works, also criu's parasite
threads, which belong to the rank's processes). The freezer belongs to the kernel: a frozen copy stays frozen if the
daemon, the keeper or criu dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

from snapshotd.api.errors import Internal, Timeout, Where
from snapshotd.proc import cgroup_paths, mountinfo
from snapshotd.proc.tree import PidList


def mount_point() -> Path:
    """Where cgroup2 is mounted. Raises Internal if it is not."""
    root = mountinfo.cgroup2_root()
    if root is None:
        raise Internal("cgroup v2 is not mounted on this node", remedy="run `mount -t cgroup2 none /sys/fs/cgroup`")
    return root


def of_process(pid: int) -> Path:
    """The cgroup2 directory of a process."""
    path = cgroup_paths.unified_path(pid)
    if path is None:
        raise Internal(f"process {pid} is not in a cgroup of version 2")
    return mount_point() / path.lstrip("/")


def for_guests() -> Path:
    """Where this daemon puts criu and ranks that came from other nodes: beside the daemon's own cgroup, never in it."""
    own = of_process(os.getpid())
    return (own.parent if own != mount_point() else own) / "snapshotd-ranks"


class Cgroup(PidList):
    """One cgroup2 directory."""

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
        except OSError:
            return []

    def exists(self) -> bool:
        return self.path.is_dir()

    def _event(self, name: str) -> bool:
        try:
            fields = (self.path / "cgroup.events").read_text().split()
        except OSError:
            return False
        return dict(zip(fields[::2], fields[1::2], strict=True)).get(name) == "1"

    def frozen(self) -> bool:
        return self._event("frozen")

    def freeze(self, deadline_s: float) -> None:
        """Freezes, and waits until the kernel reports `frozen 1` (the write itself returns earlier). Blocking."""
        (self.path / "cgroup.freeze").write_text("1")
        self._await("frozen", True, deadline_s)

    def thaw(self, deadline_s: float) -> None:
        """Thaws, and waits until it is thawed. Succeeds if the group does not exist or is removed meanwhile. Blocking."""
        try:
            (self.path / "cgroup.freeze").write_text("0")
            self._await("frozen", False, deadline_s)
        except OSError:
            if self.exists():
                raise

    def kill(self, deadline_s: float) -> None:
        """Sends SIGKILL to every process in it, frozen or not, and waits until it is empty. Blocking."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "cgroup.kill").write_text("1")
            self._await("populated", False, deadline_s)

    def remove(self) -> None:
        """Removes the directory and those below it, as far as they are empty."""
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
                            f"cgroup {self.path.name} is {'not' if wanted else 'still'} {name} after {deadline_s:.0f} s",
                            where=Where.UNKNOWN,
                        )
                    poll.poll(min(left_s, 0.1) * 1000)
                    events.seek(0)
                    events.read()
        except OSError:  # it was removed meanwhile, so it is empty and nothing is frozen
            if wanted:
                raise
