"""The physical page frames of a process, from its /proc/PID/pagemap: two processes share a page if they have the same frame.

Only pages of private mappings that a fork shares are looked at: anonymous pages that are in memory. Needs PAGEMAP_SCAN
(Linux 6.7), and the rights to see frame numbers (CAP_SYS_ADMIN).

The processes must be frozen. The kernel may still move a page to another frame at any moment, so a caller that compares two
processes reads the frames of one of them again afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterator
from typing import Self

from snapshotd.criu import page_ranges
from snapshotd.criu.page_ranges import Range
from snapshotd.proc import maps

PAGE_BYTES = mmap.PAGESIZE
ENTRY_BYTES = 8
#: Of an entry: the frame number, and that the page is in memory.
_FRAME = (1 << 55) - 1
_PRESENT = 1 << 63

#: struct pm_scan_arg and struct page_region of linux/fs.h
_SCAN = struct.Struct("=12Q")
_REGION = struct.Struct("=3Q")
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
_REGIONS = 4096
_IS_FILE, _IS_PRESENT, _IS_ZERO = 1 << 2, 1 << 3, 1 << 5

#: span, rights and name of each mapping
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ \d+ *(.*)$", re.MULTILINE)
#: Names of mappings that criu restores in a way of their own, or whose pages are no ordinary ones.
_SPECIAL = re.compile(rb"\[(?!heap\]|stack\]|anon:)|/dev/|/anon_hugepage|/\[aio\]")


class NotSupported(Exception):
    """This kernel cannot list pages, or does not show this process the numbers of frames."""


class PageFrames:
    """The pagemap of one process. Everything blocks. Raises FileNotFoundError or ProcessLookupError if it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def private(self) -> list[Range]:
        """The anonymous pages of its private mappings that are in memory, without zero pages."""
        wanted = private_mappings(maps.read_raw(self._pid))
        if not wanted:
            return []
        return page_ranges.common(page_ranges.joined(self._scan(wanted[0][0], wanted[-1][1])), wanted)

    def read(self, start: int, end: int) -> bytes:
        """The entries of these pages: 8 bytes for each."""
        offset, left = start // PAGE_BYTES * ENTRY_BYTES, (end - start) // PAGE_BYTES * ENTRY_BYTES
        parts = []
        while left:
            part = os.pread(self._fd, left, offset)
            if not part:
                raise ProcessLookupError(errno.ESRCH, f"process {self._pid} has ended")
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return b"".join(parts)

    def _scan(self, start: int, end: int) -> Iterator[Range]:
        regions = ctypes.create_string_buffer(_REGIONS * _REGION.size)
        excluded, wanted = _IS_ZERO | _IS_FILE, _IS_ZERO | _IS_FILE | _IS_PRESENT
        while start < end:
            argument = bytearray(
                _SCAN.pack(
                    *(_SCAN.size, 0, start, end, 0, ctypes.addressof(regions), _REGIONS, 0),
                    *(excluded, wanted, 0, _IS_PRESENT),
                )
            )
            try:
                found = fcntl.ioctl(self._fd, _PAGEMAP_SCAN, argument)
            except OSError as error:
                if error.errno in (errno.ENOTTY, errno.EINVAL):
                    raise NotSupported("the kernel has no PAGEMAP_SCAN (Linux 6.7)") from error
                raise
            for index in range(found):
                first, last, _ = _REGION.unpack_from(regions, index * _REGION.size)
                yield first, last
            start = _SCAN.unpack(argument)[4]


def private_mappings(text: bytes) -> list[Range]:
    """The ordinary private mappings in /proc/PID/maps, neighbours joined."""
    found = [
        (int(start, 16), int(end, 16))
        for start, end, sharing, name in _MAPPING.findall(text)
        if sharing == b"p" and not _SPECIAL.match(name)
    ]
    return page_ranges.joined(found)


def same_frames(left: bytes, right: bytes) -> Iterator[tuple[int, int]]:
    """First and last (excluded) index of each run of pages that are in memory and have the same frame in both.

    Both are what `PageFrames.read` returns, for as many pages. Raises NotSupported if the frame numbers are hidden."""
    count = len(left) // ENTRY_BYTES
    frames = _repeated(_FRAME, count)
    mine, theirs = (int.from_bytes(one, "little") for one in (left, right))
    unlike = (mine ^ theirs) & frames | (~(mine & theirs) & _repeated(_PRESENT, count))
    shown = _any_bit(mine & frames, count)
    for run in re.finditer(rb"\0+", _any_bit(unlike, count)):
        first, last = run.span()
        if b"\0" in shown[first:last]:
            raise NotSupported("the kernel does not show the numbers of page frames (CAP_SYS_ADMIN)")
        yield first, last


def _repeated(word: int, count: int) -> int:
    return int.from_bytes(word.to_bytes(ENTRY_BYTES, "little") * count, "little")


def _any_bit(words: int, count: int) -> bytes:
    """A byte for each 64-bit word, which is 0 if the word is. On long integers: a loop over pages would take seconds."""
    low = _repeated((1 << 32) - 1, count)
    words = (words | words >> 32) & low
    words |= words >> 16
    words |= words >> 8
    return words.to_bytes(count * ENTRY_BYTES, "little")[::ENTRY_BYTES]
