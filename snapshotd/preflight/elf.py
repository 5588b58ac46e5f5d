"""Which libraries an ELF file asks the dynamic linker for.

The file is the user's: it may be no ELF file, or be made to keep its reader busy. Only so much of it is read.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from typing import BinaryIO

from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

#: The largest libraries of torch take less than a tenth of these.
_MAX_BYTES = 1 << 20
_MAX_CALLS = 40_000

logger = logging.getLogger(__name__)


def needed_libraries(path: str) -> list[str]:
    """The names in DT_NEEDED; empty if the file is not ELF or not dynamically linked, or takes too much reading."""
    with open(path, "rb") as file:
        try:
            elf = ELFFile(_Bounded(file))
            elf.header["e_shoff"] = 0  # no sections: only segments matter to the linker, and section tables are long
            for segment in elf.iter_segments("PT_DYNAMIC"):
                if isinstance(segment, DynamicSegment):
                    return [str(tag.needed) for tag in segment.iter_tags("DT_NEEDED")]
        except Exception as error:  # noqa: BLE001  (pyelftools raises exceptions of any type for a malformed file)
            logger.debug("%s: not an ELF file with a readable dynamic segment: %r", path, error)
    return []


class _Bounded(io.RawIOBase):
    """Reads a file until a budget of bytes and of calls is used up; then raises OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes_left = _MAX_BYTES
        self._calls_left = _MAX_CALLS

    def read(self, size: int = -1) -> bytes:
        self._calls_left -= 1
        if self._calls_left < 0 or self._bytes_left <= 0:
            raise OSError(errno.EFBIG, "too much to read for an ordinary program")
        data = self._file.read(min(size, self._bytes_left) if size >= 0 else self._bytes_left)
        self._bytes_left -= len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
