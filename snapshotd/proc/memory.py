"""How much more memory a process may use on this node: what is free, and what its cgroups allow.

A scheduler's limit can kill a job on a node that has memory left, so both are checked. Page cache counts as free, because
the kernel reclaims it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from snapshotd.proc import cgroup_paths, meminfo, mountinfo
from snapshotd.proc.files import read_text

THIS_NODE = "this node"
#: names of the limit, of the usage and of the page cache rows of memory.stat, in cgroup v2 and v1
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def memory_room(pid: int) -> list[tuple[str, int]]:
    """What limits the process, and how many bytes that leaves it; the tightest limit first."""
    groups = cgroup_rooms(read_text(f"/proc/{pid}/cgroup"), read_text("/proc/self/mountinfo"))
    return sorted([(THIS_NODE, meminfo.available_bytes()), *groups], key=lambda room: room[1])


def cgroup_rooms(membership: str, mounts: str) -> Iterator[tuple[str, int]]:
    """The same for each cgroup that limits it. The arguments are the texts of /proc/PID/cgroup and mountinfo."""
    unified, memory = _roots(mountinfo.parse(mounts))
    for one in cgroup_paths.parse(membership):
        if one.unified:
            root, names = unified, _V2
        elif "memory" in one.controllers:
            root, names = memory, _V1
        else:
            continue
        if root is None or ".." in one.path.split("/"):
            continue  # not mounted, or above what this daemon's cgroup namespace shows
        group = root / one.path.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, *names)
            if room is not None:
                yield f"cgroup {folder}", room
            if folder == root:
                break


def _room(folder: Path, limit: str, use: str, cache: tuple[str, ...]) -> int | None:
    """None where there is no limit: the root group, a group without the controller, `max`."""
    try:
        limit_bytes = (folder / limit).read_text().strip()
        if not limit_bytes.isdigit():
            return None
        used_bytes = int((folder / use).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max(0, int(limit_bytes) - used_bytes + sum(int(rows.get(row, 0)) for row in cache))


def _roots(mounts: list[mountinfo.Mount]) -> tuple[Path | None, Path | None]:
    """Where cgroup v2 and the memory controller of v1 are mounted."""
    memory = (mount.point for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options)
    return mountinfo.cgroup2_root(mounts), next(memory, None)
