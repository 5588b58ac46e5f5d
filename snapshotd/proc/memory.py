"""How much more memory a process may use on this node: what is free, and what its cgroups allow.

A scheduler's limit can kill a job on a node that has memory left, so both are checked. Page cache counts as free, because
the kernel reclaims it first.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from snapshotd.proc import cgroup, cgroup_paths, meminfo, mountinfo
from snapshotd.proc.files import read_text

THIS_NODE = "this node"
#: names of the limit, of the usage and of the page cache rows of memory.stat, in cgroup v2 and v1
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_PRESSURE = "/proc/pressure/memory"
_READ_BYTES = 16 << 10  # more than any of these files has


def memory_room(pid: int) -> list[tuple[str, int]]:
    """What limits the process, and how many bytes that leaves it; the tightest limit first."""
    groups = cgroup_rooms(read_text(f"/proc/{pid}/cgroup"), read_text("/proc/self/mountinfo"))
    return sorted([(THIS_NODE, meminfo.available_bytes()), *groups], key=lambda room: room[1])


def guests_room() -> tuple[str, int]:
    """The tightest of the limits of a rank that comes to this node. Its cgroup (v2) is beside this daemon's; in a hierarchy
    of version 1 it stays in the daemon's."""
    root = mountinfo.cgroup2_root()
    own = (line for line in read_text("/proc/self/cgroup").splitlines() if root is None or not line.startswith("0::"))
    guests = [f"0::/{cgroup.for_guests().relative_to(root)}"] if root is not None else []
    groups = cgroup_rooms("\n".join([*own, *guests]), read_text("/proc/self/mountinfo"))
    return min([(THIS_NODE, meminfo.available_bytes()), *groups], key=lambda room: room[1])


def cgroup_rooms(membership: str, mounts: str) -> Iterator[tuple[str, int]]:
    """The same for each cgroup that limits it. The arguments are the texts of /proc/PID/cgroup and mountinfo."""
    for folder, names in _groups(membership, mounts):
        room = _room(folder, *names)
        if room is not None:
            yield f"cgroup {folder}", room


class OwnRoom:
    """The same for this process, whose cgroups do not change: its files are opened once and read again.

    Usable in a sandbox that is entered afterwards, and often: a move that grows by gigabytes a second is watched with it.
    """

    def __init__(self) -> None:
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        opened = [self._meminfo]
        #: Also if it is forgotten: it has a dozen descriptors.
        self._closing = weakref.finalize(self, close_all, opened)
        self._groups: list[tuple[Path, tuple[int, int, int], tuple[str, ...]]] = []
        for folder, (limit, use, cache) in _groups(read_text("/proc/self/cgroup"), read_text("/proc/self/mountinfo")):
            if not all((folder / name).exists() for name in (limit, use, "memory.stat")):
                continue  # the root group, or one without the controller
            fds = [os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in (limit, use, "memory.stat")]
            opened += fds
            self._groups.append((folder, (fds[0], fds[1], fds[2]), cache))

    def node(self) -> tuple[str, int]:
        """What this node has left, whatever its cgroups allow this process. Raises OSError after `close`."""
        return THIS_NODE, meminfo.parse_available(_read(self._meminfo))

    def tightest(self) -> tuple[str, int]:
        """What limits this process most, and how many bytes that leaves it."""
        found = self.node()
        for folder, fds, cache in self._groups:
            with contextlib.suppress(OSError):  # a group that was removed limits nothing
                room = _left(_read(fds[0]), _read(fds[1]), _read(fds[2]), cache)
                if room is not None and room < found[1]:
                    found = (f"cgroup {folder}", room)
        return found

    def close(self) -> None:
        """Idempotent."""
        self._groups, self._meminfo = [], -1
        self._closing()


def stalled_percent(path: str = _PRESSURE) -> float:
    """The share of the last ten seconds in which no process could run for lack of memory (PSI, `full avg10`). 0 where the
    kernel does not measure it."""
    try:
        rows = [line.split() for line in read_text(path).splitlines()]
        return next(float(row[1].removeprefix("avg10=")) for row in rows if row[:1] == ["full"])
    except (OSError, ValueError, StopIteration, IndexError):
        return 0.0


def _groups(membership: str, mounts: str) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Each cgroup of the process and those above it, with the names of their files."""
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
            yield folder, names
            if folder == root:
                break


def _room(folder: Path, limit: str, use: str, cache: tuple[str, ...]) -> int | None:
    """None where there is no limit: the root group, a group without the controller, `max`."""
    try:
        texts = [(folder / name).read_text() for name in (limit, use, "memory.stat")]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _left(texts[0], texts[1], texts[2], cache)


def _left(limit: str, used: str, stat: str, cache: tuple[str, ...]) -> int | None:
    if not limit.strip().isdigit():
        return None
    rows = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - int(used) + sum(int(rows.get(row, 0)) for row in cache))


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read(fd: int) -> str:
    return os.pread(fd, _READ_BYTES, 0).decode()


def _roots(mounts: list[mountinfo.Mount]) -> tuple[Path | None, Path | None]:
    """Where cgroup v2 and the memory controller of v1 are mounted."""
    memory = (mount.point for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options)
    return mountinfo.cgroup2_root(mounts), next(memory, None)
