"""File locks: /proc/PID/fdinfo names those of one descriptor, /proc/locks those of all processes of this node.

Only fdinfo tells which process has a lock. In /proc/locks an OFD lock has no pid, and an flock has the pid of the process
that took it, which may have passed it on to its children and ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from snapshotd.proc.files import lines, read_text

_IN_FDINFO = "lock:"


@dataclass(frozen=True, slots=True)
class Lock:
    kind: str  # POSIX, FLOCK, OFDLCK, LEASE …
    pid: int  # of the process that took it; -1 for OFDLCK, 0 if that process has ended
    shared: bool  # others may have the same lock at the same time: LOCK_SH, F_RDLCK
    file: tuple[int, int]  # device and inode; some file systems (btrfs, overlayfs) give st_dev another value


def parse(text: str) -> Iterator[Lock]:
    """The locks of /proc/locks. Requests that wait for one, and lines of an unknown form, are left out."""
    return _parse(lines(text))


def parse_fdinfo(text: str) -> Iterator[Lock]:
    """The locks that were taken through a descriptor, from its fdinfo."""
    return _parse(line.removeprefix(_IN_FDINFO) for line in lines(text) if line.startswith(_IN_FDINFO))


def _parse(rows: Iterable[str]) -> Iterator[Lock]:
    for row in rows:
        fields = row.split()
        try:
            major, minor, inode = fields[5].split(":")
            file = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
            yield Lock(fields[1], int(fields[4]), fields[3] == "READ", file)
        except (IndexError, OverflowError, ValueError):  # also a request that waits, which has "->" in its second field
            continue


def read() -> list[Lock]:
    return list(parse(read_text("/proc/locks")))


def read_of(pid: int, number: int) -> list[Lock]:
    """The locks of one descriptor of a process. Raises FileNotFoundError or ProcessLookupError if it is closed."""
    return list(parse_fdinfo(read_text(f"/proc/{pid}/fdinfo/{number}")))
