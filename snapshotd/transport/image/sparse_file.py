"""Reads regular files in chunks of data and holes, and writes them, so that a hole costs nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from snapshotd.api.errors import Damaged, Where
from snapshotd.transport.image.fifo import Stop
from snapshotd.transport.image.frame import Frame, hole_frame, raw_frame


def file_chunk(
    name: str, fd: int, offset: int, size: int, chunk_bytes: int, strong: bool, sequence: int
) -> tuple[Frame | None, Stop]:
    """The hole or the chunk of data at `offset`, not prepared. Blocks."""
    data_at = _seek(fd, offset, os.SEEK_DATA, size)
    if data_at > offset or offset == size:
        return hole_frame(sequence, name, offset, data_at - offset, strong=strong), Stop.FULL
    end = min(_seek(fd, offset, os.SEEK_HOLE, size), offset + chunk_bytes, size)
    data = os.pread(fd, end - offset, offset)
    if len(data) != end - offset:
        raise Damaged(f"{name} became shorter while it was being sent", where=Where.SOURCE_FROZEN)
    return raw_frame(sequence, name, offset, data, strong=strong), Stop.FULL


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


def put(path: Path, frame: Frame) -> None:
    """Writes the chunk's pages. Zero pages are left out: the file is new, so a hole reads as zero."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        payload = memoryview(frame.payload)
        for start, end in frame.runs():
            run, payload = payload[: end - start], payload[end - start :]
            position = frame.offset + start
            while run:
                written = os.pwrite(fd, run, position)
                run, position = run[written:], position + written
    finally:
        os.close(fd)
