"""Disk space that belongs to the journal: a file of fixed size, which is given up when the disk is full.

Invariant: a move that was begun can be journalled to its end. Whatever fills the file system of state_dir, the records of
moves in progress still fit into the space of this file. Until it is filled again, no further move begins here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from snapshotd.api.errors import Busy

log = logging.getLogger(__name__)

FILE = "reserve"
#: Two records with the largest stdio state (48 MiB) would not fit; such states are of ranks that are cut off.
RESERVE_BYTES = 64 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}

T = TypeVar("T")


class Reserve:
    """The reserve of one state_dir. All methods block."""

    def __init__(self, state_dir: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self.path = state_dir / FILE
        self.size_bytes = size_bytes
        self._lock = threading.Lock()

    def is_held(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        return found.st_size >= self.size_bytes and found.st_blocks * 512 >= self.size_bytes

    def hold(self) -> bool:
        """Allocates the space unless it is. False if the disk has not enough."""
        with self._lock:
            if self.is_held():
                return True
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(fd, 0, self.size_bytes)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.path.unlink(missing_ok=True)
                log.error("no disk space for the reserve of the journal (%s): %s", self.path, error.strerror)
                return False
            return True

    def must_be_held(self) -> None:
        """Raises Busy if a new move could not be journalled to its end."""
        if not self.hold():
            raise Busy(
                f"the disk of {self.path.parent} is full: {self.size_bytes >> 20} MiB for the journal are not free",
                remedy="free space there, then retry",
            )

    def within(self, write: Callable[[], T]) -> T:
        """Runs `write`, which must be repeatable; if the disk is full, gives up the reserve and runs it once more."""
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL or not self._give_up():
                raise
        return write()

    def _give_up(self) -> bool:
        with self._lock:
            try:
                os.truncate(self.path, 0)  # unlike unlink, which needs a block in some file systems
            except OSError:
                return False
        log.critical("the disk of %s is full: the journal uses its reserve; free space there", self.path.parent)
        return True
