"""/proc/PID/cgroup: the cgroups that a process is in."""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.proc.files import lines, read_text


@dataclass(frozen=True, slots=True)
class CgroupPath:
    controllers: tuple[str, ...]  # empty: cgroup v2
    path: str  # from the root of its hierarchy, as the reader's cgroup namespace shows it

    @property
    def unified(self) -> bool:
        """Whether this is cgroup v2, which has a single hierarchy for all controllers."""
        return not self.controllers


def parse(text: str) -> list[CgroupPath]:
    rows = (line.split(":", 2) for line in lines(text))
    return [CgroupPath(tuple(names.split(",")) if names else (), path) for _, names, path in rows]


def read(pid: int) -> list[CgroupPath]:
    """Raises FileNotFoundError or ProcessLookupError if the process has ended."""
    return parse(read_text(f"/proc/{pid}/cgroup"))


def unified_path(pid: int) -> str | None:
    """The path of the process in cgroup v2; None if that is not mounted."""
    return next((one.path for one in read(pid) if one.unified), None)
