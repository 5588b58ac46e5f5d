"""Finds the pages of a process that were written: userfaultfd's asynchronous write protection, and the PAGEMAP_SCAN ioctl.

A page of a registered mapping is *written* unless it was protected and not written since. Nothing waits for this process: the
kernel removes the protection of a page when it is written, which costs one minor fault. Linux 6.7 or later.

Invariant: `protect` protects a page before it returns it. So content that is read afterwards is either the last, or the page
is returned again. A page that is not there (never used, or given back) is neither written nor clean.

The two descriptors and those of /proc/PID/mem and /proc/PID/smaps belong to the memory that the process had when they were
made: after an exec they find nothing, and never another program's memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator

Range = tuple[int, int]  # addresses: first, and first after it

_REGISTER = 0xC020AA00  # _IOWR(0xAA, 0, struct uffdio_register)
_MODE_WP = 2
_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
#: size, flags, start, end, walk_end, vec, vec_len, max_pages; categories: inverted, mask, any of, returned
_SCAN_ARGUMENT = struct.Struct("=12Q")
_WALK_END_AT = 32
_FOUND = struct.Struct("=QQQ")  # start, end, categories
_WP_MATCHING = 1
_WPALLOWED, _WRITTEN, _PRESENT, _SWAPPED, _PFNZERO = 1, 2, 8, 16, 32
_BATCH = 8192

#: Of the last byte of an entry in /proc/PID/pagemap: the page is in memory, or swapped out; it is protected.
_PRESENT_BIT, _SWAPPED_BIT, _PROTECTED_BIT = 0x80, 0x40, 0x02
_CLEAN = bytes(bool(byte & (_PRESENT_BIT | _SWAPPED_BIT) and byte & _PROTECTED_BIT) for byte in range(256))
_ENTRY_BYTES = 8
_PAGE_BYTES = 4096
#: Whose entries are read at a time.
_BLOCK_BYTES = 1 << 28


class Pages:
    """The pages of one process, by its userfaultfd and its /proc/PID/pagemap. Every method may raise OSError."""

    def __init__(self, userfaultfd: int, pagemap: int) -> None:
        self._userfaultfd, self._pagemap = userfaultfd, pagemap
        self._found = ctypes.create_string_buffer(_BATCH * _FOUND.size)

    def register(self, start: int, end: int) -> None:
        """From now on pages of this part of a mapping can be protected. All of them count as written."""
        fcntl.ioctl(self._userfaultfd, _REGISTER, struct.pack("=4Q", start, end - start, _MODE_WP, 0))

    def protect(self, start: int, end: int) -> Iterator[Range]:
        """The written pages, which are protected again. Zero pages of the kernel's are left out."""
        mask = _WPALLOWED | _WRITTEN | _PFNZERO
        return self._scan(start, end, _WP_MATCHING, _PFNZERO, mask)

    def clean(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The pages that are there: runs of them, by their addresses, with a byte for each page: 1 if it was protected and
        not written since. Not as ranges: of a process that writes here and there, there would be one for every few pages."""
        # Only where writes are noted: some kernels leave the protection in pages that mremap has moved, and note none there.
        for first, last in self._scan(start, end, 0, 0, _WPALLOWED, returned=0):
            for at in range(first, last, _BLOCK_BYTES):
                count = (min(at + _BLOCK_BYTES, last) - at) // _PAGE_BYTES * _ENTRY_BYTES
                yield at, self._entries(count, at // _PAGE_BYTES * _ENTRY_BYTES)[7::_ENTRY_BYTES].translate(_CLEAN)

    def _entries(self, count: int, offset: int) -> bytes:
        parts = []
        while count:
            part = os.pread(self._pagemap, count, offset)
            if not part:
                raise ProcessLookupError(errno.ESRCH, "it has ended")
            parts.append(part)
            count, offset = count - len(part), offset + len(part)
        return b"".join(parts)

    def _scan(
        self, start: int, end: int, flags: int, inverted: int, mask: int, returned: int = _WRITTEN
    ) -> Iterator[Range]:
        vector = ctypes.addressof(self._found)
        while start < end:
            fields = (start, end, 0, vector, _BATCH, 0, inverted, mask, _PRESENT | _SWAPPED, returned)
            argument = bytearray(_SCAN_ARGUMENT.pack(_SCAN_ARGUMENT.size, flags, *fields))
            count = fcntl.ioctl(self._pagemap, _SCAN, argument)
            found = [(first, last) for first, last, _ in _FOUND.iter_unpack(self._found.raw[: count * _FOUND.size])]
            yield from found
            if count < _BATCH:
                return
            # Where the kernel has stopped. It leaves an earlier address there if it has come to the end.
            (walked,) = struct.unpack_from("=Q", argument, _WALK_END_AT)
            start = max(walked, found[-1][1])
