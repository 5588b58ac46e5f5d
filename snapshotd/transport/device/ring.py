"""A stripe on its way between two processes of a node: a ring of memory that both have mapped, in a file on tmpfs.

One process writes (holder/copier.py on a source, receive.py on a target), the other reads (send.py, holder/filler.py). Byte
`at` of the stripe lies at `at % ring.bytes`. So a move needs the same host memory whatever the size of the rank. Its pages
are allocated once, before the freeze: a file that grows at one end and is emptied at the other was rejected, because the
kernel clears each page that it allocates, which took as long as sending it. The process that uses the GPU pins the memory, so
bytes are encrypted from where the GPU has put them, and decrypted to where it reads them.

The first page has three counters of bytes of the stripe: what the writer has begun to overwrite with, what it has written,
and what the reader has released. They outlive a process that uses the GPU: the one that replaces it continues there.

Invariant: written <= begun <= released + ring.bytes, so nothing is overwritten that was not read. Each counter has one writer
and only grows. Between the bytes and the counter that announces them, both sides release and take the interpreter's lock,
which orders memory on every architecture.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

#: Of one stripe: what several records and chunks need that are under way at the same time.
RING_BYTES = 64 << 20
#: How much of what was read stays on a source. A connection that breaks loses what is in the buffers of both sockets.
BEHIND_BYTES = 24 << 20
#: How far back a sender may refer to equal bytes. Both rings still have them.
TWINS_BYTES = 16 << 20

_HEADER_BYTES = mmap.PAGESIZE
#: Of the file of a ring.
FILE_BYTES = _HEADER_BYTES + RING_BYTES
_BEGUN, _WRITTEN, _RELEASED = range(3)
#: How often a process looks that waits for the other one. A message would take longer, through the daemon.
LOOK_S = 0.001
_STEP_BYTES = 16 << 20

#: Of bytes that may be in several places: (how far from the first byte, address in this process, bytes).
Pieces = list[tuple[int, int, int]]


def memory_bytes(stripes: int) -> int:
    """Host memory for so many stripes, on either node. A move reserves it before the freeze."""
    return stripes * FILE_BYTES


def create(path: str, ring_bytes: int, look: Callable[[], None] = lambda: None) -> None:
    """Creates the file of a ring with all its memory. `look` is called before each step of that, and raises if memory has
    become scarce. Raises OSError, too; nothing is left then."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for at in range(0, _HEADER_BYTES + ring_bytes, _STEP_BYTES):
            look()
            os.posix_fallocate(fd, at, min(_STEP_BYTES, _HEADER_BYTES + ring_bytes - at))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


class Ring:
    def __init__(self, path: str) -> None:
        """Maps the file, of which all memory was allocated. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self.bytes = len(self._map) - _HEADER_BYTES
        self._counters = memoryview(self._map)[:_HEADER_BYTES].cast("Q")
        self._data = memoryview(self._map)[_HEADER_BYTES:]
        #: Where the memory of the ring begins in this process.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, _HEADER_BYTES))

    @property
    def written(self) -> int:
        return int(self._counters[_WRITTEN])

    @property
    def released(self) -> int:
        return int(self._counters[_RELEASED])

    def still_has(self, at: int) -> bool:
        """Whether what follows `at` is still there. To be asked after it was used: the writer may have begun meanwhile."""
        return int(self._counters[_BEGUN]) <= at + self.bytes

    def view(self, at: int, length: int) -> memoryview:
        """Bytes of the stripe that do not go across the end of the ring."""
        begin = at % self.bytes
        if begin + length > self.bytes:
            raise ValueError(f"{length} bytes at {at} go across the end of a ring of {self.bytes}")
        return self._data[begin : begin + length]

    def pieces(self, at: int, length: int) -> Pieces:
        """Any bytes of the stripe."""
        found = []
        done = 0
        while done < length:
            begin = (at + done) % self.bytes
            size = min(length - done, self.bytes - begin)
            found.append((done, self.address + begin, size))
            done += size
        return found

    # ------------------------------------------------------------ the writer

    def has_room(self, end: int, behind_bytes: int = 0) -> bool:
        """Up to `end`, with so much of what was released left."""
        return max(0, self.released - behind_bytes) >= end - self.bytes

    def begin(self, end: int, behind_bytes: int = 0) -> None:
        """Waits until there is room. The writer may then overwrite it."""
        while not self.has_room(end, behind_bytes):
            time.sleep(LOOK_S)
        self._counters[_BEGUN] = max(self._counters[_BEGUN], end)

    def wrote(self, end: int) -> None:
        self._counters[_WRITTEN] = end

    # ------------------------------------------------------------ the reader

    def await_written(self, end: int) -> None:
        while self.written < end:
            time.sleep(LOOK_S)

    def release(self, end: int) -> None:
        """Bytes before `end` may be overwritten. A reader that begins again further back does not take that back."""
        self._counters[_RELEASED] = max(self._counters[_RELEASED], end)
