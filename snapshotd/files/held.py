"""Opens the files that a rank itself has open or mapped, by the rank's own handle and never by their paths.

A path can be swapped for a link to a file that the rank's user may not read. The handle (/proc/PID/fd/N, /proc/PID/map_files)
leads to the file that the rank has. Invariant: what is opened is a regular file, is the file that was seen before, and is one
that the rank can read: through a readable descriptor or mapping, as its owner, or because its user may open it now.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from snapshotd.files import paths
from snapshotd.files.as_user import User, UserFiles


@dataclass(frozen=True, slots=True)
class Held:
    """A regular file that a rank has open or mapped."""

    handle: str  # a path under /proc that leads to it, whatever its name refers to now
    inode: tuple[int, int]
    readable: bool  # through the handle: it is a mapping, or a descriptor that was opened for reading


def open_held(held: Held, user: User) -> int:
    """A descriptor for reading. Raises OSError: PermissionError if the rank cannot read it. Blocking."""
    handle = _handle(held)
    try:
        if held.readable or user.user_id in (0, os.fstat(handle).st_uid):
            return paths.reopen(handle)
        with UserFiles(user) as files:
            return files.reopen(handle)
    finally:
        os.close(handle)


def open_readable(held: Held) -> int:
    """The same for a handle that is readable. Raises PermissionError if it is not."""
    if not held.readable:
        raise PermissionError(errno.EACCES, "the rank has it open, but not for reading")
    handle = _handle(held)
    try:
        return paths.reopen(handle)
    finally:
        os.close(handle)


def _handle(held: Held) -> int:
    """O_PATH first: nothing else is opened if the descriptor refers to another file, a device or a FIFO by now."""
    handle = os.open(held.handle, os.O_PATH | os.O_CLOEXEC)
    found = os.fstat(handle)
    if (found.st_dev, found.st_ino) != held.inode or not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(errno.ESTALE, "the rank has another file there by now", held.handle)
    return handle
