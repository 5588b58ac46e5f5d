"""/proc/PID/fd and /proc/PID/fdinfo: the open descriptors of a process.

Nothing is opened that the process has open: links are read, or followed by stat.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.proc import fuse
from snapshotd.proc.files import parse_fields, read_text

#: Not the form of any link of the kernel. Preflight refuses a rank that has it (`kernel-objects`).
TOO_LONG = "(a path that is too long)"


@dataclass(frozen=True, slots=True)
class Descriptor:
    number: int
    link: str  # as readlink returns it: a path, pipe:[…], socket:[…], anon_inode:…
    readable: bool
    writable: bool
    stat: os.stat_result | None  # of what has a path


@dataclass(frozen=True, slots=True)
class FdInfo:
    flags: int  # as of open(2), also the access mode
    tty_index: str  # of a pseudo-terminal's master: the N of its /dev/pts/N; else empty
    watched_pid: int | None  # of a pidfd: the process it refers to, -1 if that has ended


def read_links(pid: int) -> Iterator[tuple[int, str, int]]:
    """Number, link and directory descriptor of every open descriptor. One that is closed meanwhile is left out. A path of
    more than 4,095 bytes, which readlink does not return, becomes TOO_LONG: any user can have such a file open."""
    folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number in os.listdir(folder):
            try:
                yield int(number), os.readlink(number, dir_fd=folder), folder
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                yield int(number), TOO_LONG, folder
    finally:
        os.close(folder)


def read_descriptors(
    pid: int, prefixes: tuple[str, ...] = ("",), users_devices: frozenset[int] = frozenset()
) -> Iterator[Descriptor]:
    """The open descriptors whose link begins with one of `prefixes`. `users_devices`: see snapshotd/proc/fuse.py."""
    for number, link, folder in read_links(pid):
        if not link.startswith(prefixes):
            continue
        try:
            # The link's own permission bits are how /proc shows the mode a descriptor was opened with.
            mode = os.lstat(str(number), dir_fd=folder).st_mode
            stat = fuse.stat_link(f"/proc/{pid}/fd/{number}", users_devices) if link.startswith("/") else None
        except FileNotFoundError:
            continue
        yield Descriptor(number, link, bool(mode & 0o400), bool(mode & 0o200), stat)


def parse_info(text: str) -> FdInfo:
    fields = parse_fields(text)
    watched = int(fields["Pid"]) if "Pid" in fields else None
    flags = int(fields.get("flags", "0"), 8)
    return FdInfo(flags, tty_index=fields.get("tty-index", ""), watched_pid=watched)


def read_info(pid: int, number: int) -> FdInfo:
    return parse_info(read_text(f"/proc/{pid}/fdinfo/{number}"))
