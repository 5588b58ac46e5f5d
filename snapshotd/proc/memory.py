"""How much more memory a process may take on this node: what is free, and what its cgroups leave it.

A scheduler's limit kills the job where the node itself has room; both are asked. Page cache counts as room, because the
kernel gives it back first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from snapshotd.preflight.node import memory_available_bytes
from snapshotd.proc.processes import read_text

THIS_NODE = "this node"
#: name of the limit, of the use and of the statistics' cache rows, in version 2 and 1 of cgroups
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def memory_room(pid: int) -> list[tuple[str, int]]:
    """Whose limit, and how many bytes it leaves the process; the tightest first."""
    groups = cgroup_rooms(read_text(f"/proc/{pid}/cgroup"), read_text("/proc/self/mountinfo"))
    return sorted([(THIS_NODE, memory_available_bytes()), *groups], key=lambda room: room[1])


def cgroup_rooms(membership: str, mountinfo: str) -> Iterator[tuple[str, int]]:
    """The same of each group that limits it; both arguments are texts of /proc."""
    unified, memory = _mounts(mountinfo)
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = unified, _V2
        elif "memory" in controllers.split(","):
            root, names = memory, _V1
        else:
            continue
        if root is None or ".." in path.split("/"):
            continue  # not mounted, or above what this daemon's cgroup namespace shows
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, *names)
            if room is not None:
                yield f"cgroup {folder}", room
            if folder == root:
                break


def _room(folder: Path, limit: str, use: str, cache: tuple[str, ...]) -> int | None:
    """None where there is no limit: the root group, a group without the controller, `max`."""
    try:
        told = (folder / limit).read_text().strip()
        if not told.isdigit():
            return None
        taken = int((folder / use).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max(0, int(told) - taken + sum(int(rows.get(row, 0)) for row in cache))


def _mounts(mountinfo: str) -> tuple[Path | None, Path | None]:
    """Where cgroup v2 and the memory controller of v1 are mounted."""
    unified = memory = None
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        words = kind.split()
        place = Path(fields.split()[4].replace("\\040", " "))
        if words[0] == "cgroup2":
            unified = unified or place
        elif words[0] == "cgroup" and "memory" in words[-1].split(","):
            memory = memory or place
    return unified, memory
