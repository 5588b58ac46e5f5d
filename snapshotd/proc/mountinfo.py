"""/proc/self/mountinfo: what is mounted where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from snapshotd.proc.files import lines, read_text

_ESCAPE = re.compile(r"\\([0-7]{3})")  # of space, tab, newline and backslash


@dataclass(frozen=True, slots=True)
class Mount:
    point: Path
    kind: str  # of file system
    options: tuple[str, ...]  # of the file system, not of this mount
    device: int = 0  # as st_dev
    source: str = ""  # such as server:/export


def parse(text: str) -> list[Mount]:
    found = []
    for line in lines(text):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        kind, source, options = right.split(" ", 2)
        major, _, minor = fields[2].partition(":")
        try:
            device = os.makedev(int(major), int(minor))
        except OverflowError as error:
            raise ValueError(f"{fields[2]} is no device") from error
        found.append(Mount(Path(point), kind, tuple(options.strip().split(",")), device, source))
    return found


def read() -> list[Mount]:
    return parse(read_text("/proc/self/mountinfo"))


def mount_of(path: Path) -> Mount | None:
    """The mount in which a path without links is. None: not known."""
    mounts = read()
    over = [mount for mount in mounts if path.is_relative_to(mount.point)]
    # Of two at one place the later.
    return max(over, key=lambda mount: (len(mount.point.parts), mounts.index(mount))) if over else None


def cgroup2_root(mounts: list[Mount] | None = None) -> Path | None:
    """Where cgroup v2 is mounted: /sys/fs/cgroup, or …/unified under a hybrid hierarchy. None if it is not."""
    return next((mount.point for mount in (read() if mounts is None else mounts) if mount.kind == "cgroup2"), None)
