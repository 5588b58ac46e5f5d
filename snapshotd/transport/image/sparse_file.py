"""Reads regular files in chunks of data and holes, and writes them, so that a hole costs nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from snapshotd.api.errors import Damaged, Where
from snapshotd.transport.image.fifo import Stop
from snapshotd.transport.image.frame import Frame, hole_frame, raw_frame

#: More runs of pages than this in a chunk are put into what the file has, if it has all others.
_MANY_RUNS = 16


class FileChunks:
    """A regular file, a hole or a chunk of data at a time, not prepared. Blocks."""

    def __init__(self, name: str, fd: int, chunk_bytes: int, *, strong: bool) -> None:
        self._name, self._fd, self._chunk_bytes, self._strong = name, fd, chunk_bytes, strong
        self._size = os.fstat(fd).st_size
        self._at = self._data_end = 0
        self.over = False

    def next(self, sequence: int) -> tuple[Frame | None, Stop]:
        """Not after `over`. A file without content is one empty hole. Raises OSError, or Damaged if it became shorter."""
        offset = self._at
        if offset >= self._data_end:
            data_at = _seek(self._fd, offset, os.SEEK_DATA, self._size)
            if data_at > offset or offset == self._size:
                self._go_on(data_at)
                return hole_frame(sequence, self._name, offset, data_at - offset, strong=self._strong), Stop.FULL
            # Once for each run of data: the kernel looks at every page of it.
            self._data_end = _seek(self._fd, offset, os.SEEK_HOLE, self._size)
        end = min(self._data_end, offset + self._chunk_bytes)
        data = os.pread(self._fd, end - offset, offset)
        if len(data) != end - offset:
            raise Damaged(f"{self._name} became shorter while it was being sent", where=Where.SOURCE_FROZEN)
        self._go_on(end)
        return raw_frame(sequence, self._name, offset, data, strong=self._strong), Stop.FULL

    def _go_on(self, at: int) -> None:
        self._at, self.over = at, at >= self._size


def data_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that are not holes, in order. Blocks."""
    size, offset = os.fstat(fd).st_size, 0
    while (start := _seek(fd, offset, os.SEEK_DATA, size)) < size:
        offset = _seek(fd, start, os.SEEK_HOLE, size)
        yield start, offset


def _seek(fd: int, offset: int, whence: int, size: int) -> int:
    """The offset at or after `offset` where data or a hole begins, the size if there is none."""
    try:
        return min(os.lseek(fd, offset, whence), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


def put(path: Path, frame: Frame, *, replaces: bool = False) -> None:
    """Writes the chunk's pages. Zero pages are left out: the file is new, so a hole reads as zero.

    `replaces`: every page of the chunk is in the file, or in this frame (overlay.py)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        runs = list(frame.runs())
        if replaces and len(runs) > _MANY_RUNS:
            _replace(fd, frame, runs)
            return
        payload = memoryview(frame.payload)
        for start, end in runs:
            run, payload = payload[: end - start], payload[end - start :]
            _write(fd, run, frame.offset + start)
    finally:
        os.close(fd)


def _replace(fd: int, frame: Frame, runs: list[tuple[int, int]]) -> None:
    """The same in two system calls, where one for each run would take most of the time."""
    whole = memoryview(bytearray(frame.length))
    at = 0
    while at < frame.length and (count := os.preadv(fd, [whole[at:]], frame.offset + at)):
        at += count  # the file may end here, and pages of this frame follow
    payload, at = memoryview(frame.payload), 0
    for start, end in runs:
        whole[start:end] = payload[at : at + end - start]
        at += end - start
    _write(fd, whole, frame.offset)


def _write(fd: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written
