"""Room on disk for the output of ranks whose home node is out of reach, with limits that no rank can exceed.

Three limits: of one rank, of all ranks of the node, and of the free space that must remain on the file system. Room is taken
in steps before anything is written. If there is none, the rank waits when it writes (tail.py); output is never lost.

The keepers of a node share a ledger, a file with one number for each keeper: the bytes that it has taken. A keeper holds a
record lock on its number as long as it lives, so a number without a lock is of a dead keeper and does not count. Nothing
here waits for another keeper: each adds to its own number first, then sums up, and takes the step back if the sum is over
the limit. Files and ledger are opened while the keeper is root; the files have no name.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

STEP_BYTES = 16 << 20
_NUMBER = struct.Struct("!Q")
_KEEPERS = 4096
_LEDGER = "ledger"


class Spool:
    """The part of the spool that one rank may use."""

    def __init__(self, folder: str, rank_bytes: int, total_bytes: int, free_bytes: int) -> None:
        self._folder = folder
        self._rank_bytes, self._total_bytes, self._free_bytes = rank_bytes, total_bytes, free_bytes
        self._taken_bytes = 0  # written into the ledger
        self._used_bytes = 0
        self._ledger_fd = os.open(Path(folder) / _LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._number = self._free_number()
        except BaseException:
            os.close(self._ledger_fd)
            raise

    @classmethod
    def of_orders(cls, orders: dict[str, Any]) -> Spool | None:
        """None if the spool cannot be used, because its disk is full for example: ranks then wait for their readers."""
        limits = {name: int(orders[name]) for name in ("rank_bytes", "total_bytes", "free_bytes")}
        try:
            return cls(str(orders["folder"]), **limits)
        except OSError:
            return None

    def open_file(self) -> int:
        """Opens a file without a name. Raises OSError."""
        # Not O_TMPFILE: not every file system has it (overlayfs, NFS).
        fd, path = tempfile.mkstemp(dir=self._folder)
        os.unlink(path)
        return fd

    def take(self, count: int) -> bool:
        """Takes room for `count` bytes. False, and nothing is taken, if a limit would be exceeded."""
        wanted = self._used_bytes + count
        if wanted > self._rank_bytes:
            return False
        if wanted > self._taken_bytes:
            step = min(max(wanted, self._taken_bytes + STEP_BYTES), self._rank_bytes)
            if not self._extend(step) and not self._extend(wanted):
                return False
        self._used_bytes = wanted
        return True

    def give_back(self, count: int) -> None:
        self._used_bytes -= count
        if self._used_bytes == 0:
            self._taken_bytes = 0
            self._write(0)

    def _extend(self, wanted: int) -> bool:
        try:
            disk = os.fstatvfs(self._ledger_fd)
            if disk.f_bavail * disk.f_frsize - (wanted - self._taken_bytes) < self._free_bytes:
                return False
            self._write(wanted)
            if wanted + self._others_bytes() <= self._total_bytes:
                self._taken_bytes = wanted
                return True
            self._write(self._taken_bytes)
        except OSError:  # the ledger itself cannot be written
            return False
        return False

    def _others_bytes(self) -> int:
        """What the living keepers have taken. Forgets dead ones."""
        numbers = os.pread(self._ledger_fd, _KEEPERS * _NUMBER.size, 0)
        total = 0
        for index, (count,) in enumerate(_NUMBER.iter_unpack(numbers[: len(numbers) // _NUMBER.size * _NUMBER.size])):
            if count and index != self._number:
                if self._lock(index):
                    os.pwrite(self._ledger_fd, _NUMBER.pack(0), index * _NUMBER.size)
                    fcntl.lockf(self._ledger_fd, fcntl.LOCK_UN, _NUMBER.size, index * _NUMBER.size)
                else:
                    total += count
        return total

    def _free_number(self) -> int:
        """Finds a number that no living keeper has, and locks it until this process ends. Raises OSError."""
        for index in range(_KEEPERS):
            if self._lock(index):
                self._number = index
                self._write(0)
                return index
        raise OSError(28, "the ledger of the spool has no free entry")

    def _lock(self, index: int) -> bool:
        # A record lock belongs to the process, and is released by the kernel when it ends.
        try:
            fcntl.lockf(self._ledger_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _NUMBER.size, index * _NUMBER.size)
        except OSError:
            return False
        return True

    def _write(self, count: int) -> None:
        os.pwrite(self._ledger_fd, _NUMBER.pack(count), self._number * _NUMBER.size)
