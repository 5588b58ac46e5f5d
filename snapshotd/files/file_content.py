"""Copies and compares the content of files, by their descriptors."""

from __future__ import annotations

import errno
import os

_BLOCK_BYTES = 1 << 20
_COPY_BYTES = 1 << 30


def copy(image: int, file: int, size: int | None = None) -> None:
    """Copies the content, its holes as holes. `size`: only so many bytes of it."""
    size = os.fstat(image).st_size if size is None else size
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(image, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = min(size, os.lseek(image, begin, os.SEEK_HOLE))
        os.lseek(file, begin, os.SEEK_SET)
        while begin < end:
            count = os.sendfile(file, image, begin, min(_COPY_BYTES, end - begin))
            if not count:
                raise OSError(errno.EIO, "the image became shorter")
            begin += count
        offset = end
    os.ftruncate(file, size)


def same(one: int, other: int, size: int | None = None) -> bool:
    """`size`: whether so many bytes are the same, whatever follows."""
    if size is None:
        size = os.fstat(one).st_size
        if size != os.fstat(other).st_size:
            return False
    offset = 0
    while offset < size:
        block = os.pread(one, min(_BLOCK_BYTES, size - offset), offset)
        if not block or block != os.pread(other, len(block), offset):
            return False
        offset += len(block)
    return True
