"""Buffers the unacknowledged bytes of a stream, addressed by their offset from the stream's beginning.

Invariant: `base` <= every readable offset < `end`. Bytes are removed, from the front, only when they are acknowledged.
With a spool, what does not fit in memory goes to an unlinked file, so that a rank whose home node is unreachable can
continue. Without one, when a limit of the spool is reached or its disk is full, `is_full` tells the caller to stop
reading from the rank, whose writes then block as they would with a full pipe.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.keeper.spool import Spool

MEMORY_BYTES = 4 << 20
WAIT_BYTES = 1 << 20


class Tail:
    """In order: bytes in memory, bytes in the file, and (only after the spool was full) bytes that did not fit there."""

    def __init__(self, base: int = 0, spool: Spool | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self.base = base
        self._memory = bytearray()
        self._memory_bytes = memory_bytes
        self._spool = spool
        self._file = -1 if spool is None else _opened(spool)  # at once: later the keeper may not be root any more
        self._file_first = 0  # where the unacknowledged bytes begin in the file
        self._file_last = 0  # and where they end
        self._overflow = bytearray()
        self.watch: Callable[[bytes], None] | None = None  # is told what is appended

    def __len__(self) -> int:
        return len(self._memory) + self._file_last - self._file_first + len(self._overflow)

    @property
    def end(self) -> int:
        return self.base + len(self)

    @property
    def is_full(self) -> bool:
        return len(self) >= WAIT_BYTES if self._file < 0 else bool(self._overflow)

    def append(self, data: bytes) -> None:
        if self.watch is not None:
            self.watch(data)
        if self._overflow:
            self._overflow += data
        elif self._file < 0 or (self._file_last == 0 and len(self._memory) + len(data) <= self._memory_bytes):
            self._memory += data
        else:
            try:
                self._write(data)
            except OSError:
                self._overflow += data

    def read(self, offset: int, size: int) -> bytes:
        """Returns up to `size` bytes from `offset`: fewer at the border between memory and file, none at the end."""
        start = offset - self.base
        if start < 0:
            raise ValueError(f"offset {offset} has been acknowledged already: the stream begins at {self.base}")
        if start < len(self._memory):
            return bytes(memoryview(self._memory)[start : start + size])
        start += self._file_first - len(self._memory)
        if start < self._file_last:
            return os.pread(self._file, min(size, self._file_last - start), start)
        start -= self._file_last
        return bytes(memoryview(self._overflow)[start : start + size])

    def release(self, offset: int) -> None:
        """Removes everything before `offset`, which has been acknowledged."""
        count = min(offset, self.end) - self.base
        if count <= 0:
            return
        self.base += count
        from_memory = min(count, len(self._memory))
        del self._memory[:from_memory]
        count -= from_memory
        from_file = min(count, self._file_last - self._file_first)
        self._file_first += from_file
        del self._overflow[: count - from_file]
        if self._file_last and (self._file_first == self._file_last or len(self) <= self._memory_bytes):
            self._leave_file()

    def _leave_file(self) -> None:
        """Takes the rest back into memory, so that the file does not grow as long as its reader is slightly late."""
        rest = bytearray()
        while piece := os.pread(
            self._file, self._file_last - self._file_first - len(rest), self._file_first + len(rest)
        ):
            rest += piece
        os.ftruncate(self._file, 0)
        if self._spool is not None:
            self._spool.give_back(self._file_last)
        self._file_first = self._file_last = 0
        self._memory += rest + self._overflow
        self._overflow.clear()

    def _write(self, data: bytes) -> None:
        if self._spool is None or not self._spool.take(len(data)):
            raise OSError(122, "the limit of the spool is reached")
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._file_last + written)
        except OSError:
            self._spool.give_back(len(data))
            raise
        self._file_last += len(data)


def _opened(spool: Spool) -> int:
    try:
        return spool.open_file()
    except OSError:
        return -1
