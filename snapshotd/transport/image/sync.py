"""Writes images to the disk, so that they survive a crash of the machine, or it is known that the disk has them. Blocking."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WAIT_WRITE_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_…
#: Written at once. One `fsync` for a whole file does not tell whether a slow disk still works.
STEP_BYTES = 16 << 20
#: Of file systems that do not have the call: `fsync` writes all.
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}


def sync_files(folder: Path, written: Callable[[int], None] = lambda _bytes: None) -> None:
    """Writes the content of all files of a folder. `written` is called with the bytes of each step that the disk has done."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if not entry.is_file(follow_symlinks=False):
            continue
        with open(entry.path, "rb") as file:
            _write_back(file.fileno(), written)
            os.fsync(file.fileno())


def _write_back(fd: int, written: Callable[[int], None]) -> None:
    size = os.fstat(fd).st_size
    for at in range(0, size, STEP_BYTES):
        if _libc.sync_file_range(fd, at, STEP_BYTES, _WAIT_WRITE_WAIT):
            number = ctypes.get_errno()
            if number not in _NOT_HERE:
                raise OSError(number, os.strerror(number))
        written(min(STEP_BYTES, size - at))


def sync_folder(*folders: Path) -> None:
    """Writes the names in each folder, in this order."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
