"""The physical page frames of a process, from its /proc/PID/pagemap: two processes share a page if they have the same frame.

Only pages of private mappings that a fork shares are looked at: anonymous pages that are in memory. Needs PAGEMAP_SCAN
(Linux 6.7), and the rights to see frame numbers (CAP_SYS_ADMIN).

The processes must be frozen. The kernel may still move a page to another frame at any moment, so a caller that compares two
processes reads the frames of one of them again afterwards.

A rank has millions of pages, and it is paused meanwhile: no loop here is over pages, but those of Python's own functions.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import operator
import os
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Self

from snapshotd.criu import page_ranges
from snapshotd.criu.page_ranges import Range, Ranges
from snapshotd.proc import maps

PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8
#: Of an entry that is reduced to the frame number and whether the page is in memory: the latter, and one that no page has.
_PRESENT = 1 << 63
_NONE = b"\xff" * _ENTRY_BYTES
#: What is kept of the last two bytes of an entry: the upper bits of the frame number, and whether the page is in memory.
_UPPER = bytes(byte & 0x7F for byte in range(256))
_STATE = bytes(byte & 0x80 for byte in range(256))
#: The entries of pages that are not in memory, by their last bytes; runs of pages that are the same in both.
_ABSENT = re.compile(rb"\0+")
_SAME = re.compile(rb"\x01+")

#: Pages that are compared at once, and what is noted where all of them are the same.
_BLOCK_PAGES = 64
_ALL_SAME = b"\x01" * _BLOCK_PAGES

#: struct pm_scan_arg and struct page_region of linux/fs.h
_SCAN = struct.Struct("=12Q")
#: … of three numbers, of which the first two are the start and the end
_REGION_BYTES = 24
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
_REGIONS = 4096
_IS_FILE, _IS_PRESENT, _IS_ZERO = 1 << 2, 1 << 3, 1 << 5

#: span, rights, inode and name of each mapping
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ (\d+) *(.*)$", re.MULTILINE)
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

    def private(self, *, plain: bool = False) -> list[Range]:
        """The anonymous pages of its private mappings that are in memory, without zero pages. `plain`: as `private_mappings`
        says."""
        wanted = private_mappings(maps.read_raw(self._pid), plain=plain)
        if not wanted:
            return []
        return page_ranges.common(page_ranges.joined(self._scan(wanted[0][0], wanted[-1][1])), wanted)

    def read(self, ranges: Ranges) -> bytearray:
        """The entries of all pages of these ranges, one after the other, reduced to frame and presence."""
        entries = bytearray(page_ranges.size_bytes(ranges) // PAGE_BYTES * _ENTRY_BYTES)
        at = 0
        with memoryview(entries) as view:
            for start, end in ranges:
                offset, until = start // PAGE_BYTES * _ENTRY_BYTES, at + (end - start) // PAGE_BYTES * _ENTRY_BYTES
                while at < until:
                    count = os.preadv(self._fd, [view[at:until]], offset)
                    if not count:
                        raise ProcessLookupError(errno.ESRCH, f"process {self._pid} has ended")
                    at, offset = at + count, offset + count
        entries[6::_ENTRY_BYTES] = entries[6::_ENTRY_BYTES].translate(_UPPER)
        entries[7::_ENTRY_BYTES] = entries[7::_ENTRY_BYTES].translate(_STATE)
        return entries

    def _scan(self, start: int, end: int) -> Iterator[Range]:
        regions = ctypes.create_string_buffer(_REGIONS * _REGION_BYTES)
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
            numbers = memoryview(regions)[: found * _REGION_BYTES].cast("B").cast("Q").tolist()
            yield from zip(numbers[::3], numbers[1::3], strict=True)
            start = _SCAN.unpack(argument)[4]


def private_mappings(text: bytes, *, plain: bool = False) -> list[Range]:
    """The ordinary private mappings in /proc/PID/maps, neighbours joined. `plain`: only those that can be read and written,
    not executed, and have no file, which could be one of huge pages, or of a file system that a user serves. Not every kernel
    lets another process write into mappings that cannot be written (proc_mem.force_override)."""
    found = [
        (int(start, 16), int(end, 16))
        for start, end, rights, inode, name in _MAPPING.findall(text)
        if rights.endswith(b"p")
        and not _SPECIAL.match(name)
        and (not plain or (inode == b"0" and rights.startswith(b"rw-")))
    ]
    return page_ranges.joined(found)


def unchanged(ranges: Ranges, first: bytearray, *others: bytearray) -> list[Range]:
    """The pages of these ranges that are in memory, and have the same frame in all of these readings of them. Raises
    NotSupported if the frame numbers are hidden."""
    numbers = memoryview(first).cast("Q")
    _must_be_shown(numbers[:_BLOCK_PAGES].tolist())
    found: list[Range] = []
    at = 0
    for start, end in ranges:
        count = (end - start) // PAGE_BYTES
        before = start - at * PAGE_BYTES
        for block in range(at, at + count, _BLOCK_PAGES):
            runs = _same_in_all((first, *others), block, min(block + _BLOCK_PAGES, at + count))
            found += [(before + one * PAGE_BYTES, before + two * PAGE_BYTES) for one, two in runs]
        at += count
    return page_ranges.joined(found)


def _must_be_shown(entries: list[int]) -> None:
    """Raises NotSupported if the kernel hides the numbers of frames. They are all 0 then."""
    if entries and (_PRESENT in entries or not any(entries)):
        raise NotSupported("the kernel does not show the numbers of page frames (CAP_SYS_ADMIN)")


def _same_in_all(readings: Sequence[bytearray], begin: int, end: int) -> list[tuple[int, int]]:
    """The runs among these pages that are in memory, and the same in all. Mostly all are: that is seen without a look at
    each."""
    own, *theirs = (reading[begin * _ENTRY_BYTES : end * _ENTRY_BYTES] for reading in readings)
    present = own[7::_ENTRY_BYTES]
    if all(one == own for one in theirs) and 0 not in present:
        return [(begin, end)]
    same = bytearray(map(bool, present))
    for one in theirs:
        alike = map(operator.eq, memoryview(own).cast("Q").tolist(), memoryview(one).cast("Q").tolist())
        same = bytearray(map(operator.and_, same, alike))
    return [(begin + run.start(), begin + run.end()) for run in _SAME.finditer(same)]


class Frames:
    """The frames of some pages of one process, to be compared with those of others."""

    def __init__(self, spans: Ranges, entries: bytearray, wanted: Ranges) -> None:
        """`entries`: what `PageFrames.read(spans)` has returned. Only the pages of `wanted`, which lie in the spans, are
        compared. Raises NotSupported if the frame numbers are hidden."""
        self.spans, kept = spans, bytearray(_NONE * (len(entries) // _ENTRY_BYTES))
        left = iter(wanted)
        at, one = 0, next(left, None)
        for start, end in spans:
            while one is not None and one[0] < end:
                first, last = ((at + (address - start) // PAGE_BYTES) * _ENTRY_BYTES for address in one)
                kept[first:last] = entries[first:last]
                one = next(left, None)
            at += (end - start) // PAGE_BYTES
        for run in _ABSENT.finditer(kept[7::_ENTRY_BYTES]):
            first, last = run.span()
            kept[first * _ENTRY_BYTES : last * _ENTRY_BYTES] = _NONE * (last - first)
        self._kept = kept
        if (present := kept[7::_ENTRY_BYTES].find(_STATE[-1])) >= 0:
            _must_be_shown(memoryview(kept).cast("Q")[present : present + 1].tolist())

    def same(self, entries: bytearray) -> list[Range]:
        """The pages that have the same frame in `entries`, which were read of the same spans. Mostly whole blocks do, which
        is seen without a look at each page."""
        kept, equal = self._kept, bytearray(len(entries) // _ENTRY_BYTES)
        step = _BLOCK_PAGES * _ENTRY_BYTES
        for at in range(0, len(kept), step):
            own, theirs = kept[at : at + step], entries[at : at + step]
            page, count = at // _ENTRY_BYTES, len(own) // _ENTRY_BYTES
            if own == theirs:  # so all of them are wanted and in memory: no entry is like that of a page that is not
                equal[page : page + count] = _ALL_SAME[:count]
            else:
                numbers = (memoryview(one).cast("Q").tolist() for one in (own, theirs))
                equal[page : page + count] = bytes(map(operator.eq, *numbers))
        found, at = [], 0
        for start, end in self.spans:
            count = (end - start) // PAGE_BYTES
            before = start - at * PAGE_BYTES
            for run in _SAME.finditer(equal, at, at + count):
                first, last = run.span()
                found.append((before + first * PAGE_BYTES, before + last * PAGE_BYTES))
            at += count
        return found
