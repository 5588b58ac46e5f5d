"""Regular files on their way: read by what is in them, so that a file of holes costs nothing."""

from __future__ import annotations

import errno
import os

from snapshotd.api.errors import Damaged, Where
from snapshotd.transport.image.fifo import Stop
from snapshotd.transport.image.frame import Frame, data_frame, hole_frame


def file_chunk(
    name: str, fd: int, offset: int, size: int, chunk_bytes: int, sequence: int
) -> tuple[Frame | None, Stop]:
    """The hole or the piece of data at `offset`. In a thread."""
    data_at = _seek(fd, offset, os.SEEK_DATA, size)
    if data_at > offset or offset == size:
        return hole_frame(sequence, name, offset, data_at - offset), Stop.FULL
    end = min(_seek(fd, offset, os.SEEK_HOLE, size), offset + chunk_bytes, size)
    data = os.pread(fd, end - offset, offset)
    if len(data) != end - offset:
        raise Damaged(f"{name} shrank while it was sent", where=Where.SOURCE_FROZEN)
    return data_frame(sequence, name, offset, data), Stop.FULL


def _seek(fd: int, offset: int, whence: int, size: int) -> int:
    """Where data or a hole begins at or after `offset`, the size where there is none any more."""
    try:
        return min(os.lseek(fd, offset, whence), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size
