"""The child that follows the memory of one process: it has no user and no capability, and reaches nothing but descriptors.

It enters its sandbox (`Profile.TRACKER`) before it gets them. They are the only ones of their kind: the daemon has closed its
own. So when this process ends, for whatever reason, the kernel ends the tracking and nothing of it is left. A page of a
hostile process may never arrive; then the daemon kills this process. messages.py has the requests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
from collections.abc import Iterable, Iterator

from snapshotd.precopy import mappings
from snapshotd.precopy.layout import MAX_BYTES, MAX_RANGES, Layout, Range, joined
from snapshotd.precopy.messages import (
    ANSWER,
    BATCH,
    BEGIN,
    CHUNK_BYTES,
    DESCRIPTORS,
    FINISH,
    MESSAGE_BYTES,
    NEXT,
    PAGE_BYTES,
    RANGE,
    REQUEST,
    SCAN,
    SLOTS,
)
from snapshotd.precopy.written import Pages
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

_PR_SET_PDEATHSIG = 1
_NOBODY = 65534
_ZERO_PAGE = bytes(PAGE_BYTES)
_LOWEST_PRIORITY = 19


class Follower:
    """The memory of one process."""

    def __init__(self, userfaultfd: int, pagemap: int, memory: int, smaps: int, buffer: int) -> None:
        self._userfaultfd, self._memory, self._smaps = userfaultfd, memory, smaps
        self._pages = Pages(userfaultfd, pagemap)
        self._buffer = memoryview(mmap.mmap(buffer, SLOTS * CHUNK_BYTES))
        self._layout = Layout([])
        self._sent = b""  # what the target has
        self._chunks: Iterator[tuple[int, int, int, list[Range]]] = iter(())

    def begin(self, *, forked: bool) -> list[Range]:
        """Registers what is eligible now; the layout."""
        found = []
        room = MAX_BYTES
        eligible = self._eligible()
        if forked and any(one.shared_bytes >= mappings.LEAST_BYTES for one in eligible):
            return []
        for one in sorted(eligible, key=lambda one: -one.present_bytes)[:MAX_RANGES]:
            if not one.tracked and one.end - one.start <= room and self._register(one.start, one.end):
                found.append((one.start, one.end))
                room -= one.end - one.start
        self._layout = Layout(joined(sorted(found)), marks=True)
        return self._layout.ranges

    def scan(self) -> int:
        """Protects what was written; how many pages that are."""
        for one in self._eligible():
            if not one.tracked:  # mapped anew since
                for start, end in self._layout.within(one.start, one.end):
                    self._register(start, end)
        written = [part for start, end in self._layout.ranges for part in self._pages.protect(start, end)]
        for start, end in written:
            self._layout.mark(start, end, sent=False)
        self._chunks = self._layout.chunks(written)
        return sum(end - start for start, end in written) // PAGE_BYTES

    def next(self, slot: int) -> tuple[int, int, int, bytes]:
        """Reads one chunk: its offset, its length, the bytes in the buffer and the bitmap; a length of 0 at the end."""
        for offset, length, address, ranges in self._chunks:
            into = self._buffer[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]
            used, bits = 0, bytearray(b"0" * (length // PAGE_BYTES))
            for start, end in ranges:
                used = self._read(start, end, address, into, used, bits)
            if used:
                bitmap = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
                return offset, length, used, bitmap
        return 0, 0, 0, b""

    def _read(self, start: int, end: int, address: int, into: memoryview, used: int, bits: bytearray) -> int:
        """Reads pages behind those that are in the buffer, except zero ones. Returns how much it has then."""
        try:
            count = os.preadv(self._memory, [into[used : used + end - start]], start)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EFAULT):
                raise
            count = 0  # the mapping has gone
        count -= count % PAGE_BYTES
        for page in range(0, count, PAGE_BYTES):
            if into[used + page] == 0 and into[used + page : used + page + PAGE_BYTES] == _ZERO_PAGE:
                return self._without_zeros(start, count, address, into, used, bits)
        self._layout.mark(start, start + count, sent=True)
        first = (start - address) // PAGE_BYTES
        bits[first : first + count // PAGE_BYTES] = b"1" * (count // PAGE_BYTES)
        return used + count

    def _without_zeros(self, start: int, count: int, address: int, into: memoryview, used: int, bits: bytearray) -> int:
        data = bytes(into[used : used + count])
        for page in range(0, count, PAGE_BYTES):
            content = data[page : page + PAGE_BYTES]
            if content != _ZERO_PAGE:
                into[used : used + PAGE_BYTES] = content
                used += PAGE_BYTES
                self._layout.mark(start + page, start + page + PAGE_BYTES, sent=True)
                bits[(start + page - address) // PAGE_BYTES] = ord("1")
        return used

    def finish(self, part: int) -> int:
        """Writes one part of what the target has into the buffer; how many slots that are. The first ends the tracking."""
        if not part:
            ranges = self._layout.ranges
            self._sent = self._layout.sent(one for start, end in ranges for one in self._pages.clean(start, end))
            os.close(self._userfaultfd)
        found = self._sent[part * len(self._buffer) : (part + 1) * len(self._buffer)]
        self._buffer[: len(found)] = found
        return len(found)

    def _eligible(self) -> list[mappings.Mapping]:
        parts, at = [], 0
        while part := os.pread(self._smaps, 1 << 20, at):
            parts.append(part)
            at += len(part)
        return list(mappings.eligible(b"".join(parts)))

    def _register(self, start: int, end: int) -> bool:
        """False if it cannot be: it has gone, or another userfaultfd has it."""
        try:
            self._pages.register(start, end)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ESRCH):
                raise
            return False
        return True


def _answer_ranges(line: socket.socket, ranges: Iterable[Range]) -> None:
    batch: list[bytes] = []
    for one in ranges:
        batch.append(RANGE.pack(*one))
        if len(batch) == BATCH:
            line.send(ANSWER.pack(0, len(batch), 0, 0) + b"".join(batch))
            batch.clear()
    if batch:
        line.send(ANSWER.pack(0, len(batch), 0, 0) + b"".join(batch))
    line.send(ANSWER.pack(0, 0, 0, 0))


def _serve(line: socket.socket) -> None:
    follower: Follower | None = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        operation, slot = REQUEST.unpack(message)
        try:
            if operation == BEGIN:
                follower = Follower(*descriptors)
                _answer_ranges(line, follower.begin(forked=bool(slot)))
            elif follower is None:
                return
            elif operation == SCAN:
                line.send(ANSWER.pack(0, follower.scan(), 0, 0))
            elif operation == NEXT:
                offset, length, used, bitmap = follower.next(slot)
                line.send(ANSWER.pack(0, offset, length, used) + bitmap)
            elif operation == FINISH:
                line.send(ANSWER.pack(0, follower.finish(slot), 0, 0))
        except OSError as error:
            line.send(ANSWER.pack(error.errno or errno.EIO, 0, 0, 0))


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    line = socket.socket(fileno=os.dup(0))
    os.nice(_LOWEST_PRIORITY)  # the job goes before
    enter(Profile.TRACKER, Ids(_NOBODY, _NOBODY))
    _serve(line)
    os._exit(0)


if __name__ == "__main__":
    main()
