"""/proc/locks: the file locks that processes of this node have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.proc.files import lines, read_text


@dataclass(frozen=True, slots=True)
class Lock:
    kind: str  # POSIX, FLOCK, OFDLCK, LEASE …
    pid: int  # -1 for OFDLCK, which belongs to an open file description
    file: tuple[int, int]  # st_dev, st_ino


def parse(text: str) -> Iterator[Lock]:
    """Locks, and requests that wait for one. Lines of an unknown form are left out."""
    for line in lines(text):
        fields = line.replace("->", "").split()
        try:
            major, minor, inode = fields[5].split(":")
            file = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
            yield Lock(fields[1], int(fields[4]), file)
        except (IndexError, ValueError):
            continue


def read() -> list[Lock]:
    return list(parse(read_text("/proc/locks")))
