"""Buffers the unacknowledged bytes of a stream, addressed by their offset from the stream's beginning.

Invariant: `base` <= every readable offset < `end`. Bytes are removed, from the front, only when they are acknowledged.
With a spool folder, what does not fit in memory goes to an unlinked file, so that a rank whose home node is unreachable
can continue. Without one, or when that disk is full, `is_full` tells the caller to stop writing.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMORY_BYTES = 4 << 20
WAIT_BYTES = 1 << 20


class Tail:
    """In order: bytes in memory, bytes in the file, and (only after the disk was full) bytes that did not fit there."""

    def __init__(self, base: int = 0, spool_dir: str | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self.base = base
        self._memory = bytearray()
        self._memory_bytes = memory_bytes
        self._spool_dir = spool_dir
        self._spool_fd = -1
        self._spool_first = 0  # where the unacknowledged bytes begin in the file
        self._spool_last = 0  # and where they end
        self._overflow = bytearray()

    def __len__(self) -> int:
        return len(self._memory) + self._spool_last - self._spool_first + len(self._overflow)

    @property
    def end(self) -> int:
        return self.base + len(self)

    @property
    def is_full(self) -> bool:
        return len(self) >= WAIT_BYTES if self._spool_dir is None else bool(self._overflow)

    def append(self, data: bytes) -> None:
        if self._overflow:
            self._overflow += data
        elif self._spool_dir is None or (self._spool_last == 0 and len(self._memory) + len(data) <= self._memory_bytes):
            self._memory += data
        else:
            try:
                self._spool(data)
            except OSError:
                self._overflow += data

    def read(self, offset: int, size: int) -> bytes:
        """Returns up to `size` bytes from `offset`: fewer at the border between memory and file, none at the end."""
        start = offset - self.base
        if start < 0:
            raise ValueError(f"offset {offset} has been acknowledged already: the stream begins at {self.base}")
        if start < len(self._memory):
            return bytes(memoryview(self._memory)[start : start + size])
        start += self._spool_first - len(self._memory)
        if start < self._spool_last:
            return os.pread(self._spool_fd, min(size, self._spool_last - start), start)
        start -= self._spool_last
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
        from_spool = min(count, self._spool_last - self._spool_first)
        self._spool_first += from_spool
        del self._overflow[: count - from_spool]
        if self._spool_fd >= 0 and self._spool_first == self._spool_last:
            os.close(self._spool_fd)
            self._spool_fd, self._spool_first, self._spool_last = -1, 0, 0
            self._memory += self._overflow
            self._overflow.clear()

    def _spool(self, data: bytes) -> None:
        if self._spool_fd < 0:
            import tempfile  # here, because it is slow to import and most keepers never spool

            # Not O_TMPFILE: not every file system has it (overlayfs, NFS).
            self._spool_fd, path = tempfile.mkstemp(dir=self._spool_dir)
            Path(path).unlink()
        written = 0
        while written < len(data):
            written += os.pwrite(self._spool_fd, data[written:], self._spool_last + written)
        self._spool_last += len(data)
