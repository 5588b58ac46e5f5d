"""Reads long runs of anonymous pages of a frozen process, with several threads.

Invariant: what was read belongs to that process if `must_live` returns afterwards: it executes nothing while it is frozen,
and a process that has got its pid meanwhile has another start time. Everything blocks.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from snapshotd.criu.page_ranges import Range, size_bytes
from snapshotd.proc.tree import Process

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t

#: As many as the kernel takes in one call (IOV_MAX).
_MOST_PARTS = 1024


class ProcessMemory:
    """The memory of one process. Raises OSError, one of `files.GONE` if the process has ended."""

    def __init__(self, pid: int) -> None:
        self._process = Process.of(pid)
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def must_live(self) -> None:
        """Raises if the process has ended. Its memory may live on, in another process that shares it."""
        if not self._process.alive():
            raise ProcessLookupError(errno.ESRCH, "it has ended")

    def fill(self, parts: Sequence[Range], view: memoryview) -> None:
        """Reads these pages, one after the other, into the view, which has their size."""
        at, number = 0, 0
        while number < len(parts):
            batch = parts[number : number + _MOST_PARTS]
            count = _read_quickly(self._process.pid, batch, view[at : at + size_bytes(batch)])
            for start, end in batch:
                until, number = at + end - start, number + 1
                if count < end - start:  # up to a page without access; the ones after it are read quickly again
                    self._fill_rest(view, at + count, until, end)
                    at = until
                    break
                at, count = until, count - (end - start)

    def _fill_rest(self, view: memoryview, at: int, until: int, end: int) -> int:
        """Reads what belongs there, which ends at this address."""
        while at < until:
            count = os.preadv(self._fd, [view[at:until]], end - (until - at))
            if not count:
                raise ProcessLookupError(errno.ESRCH, "it has ended")
            at += count
        return at


def _read_quickly(pid: int, parts: Sequence[Range], view: memoryview) -> int:
    """Reads what process_vm_readv reads; how much that is. It takes two thirds of the time of a read from /proc/PID/mem, but
    refuses pages to which the process has no access itself."""
    here = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view)])
    there = array("Q", itertools.chain.from_iterable((start, end - start) for start, end in parts))
    vectors = [ctypes.c_void_p(one.buffer_info()[0]) for one in (here, there)]
    counts = ctypes.c_ulong(1), ctypes.c_ulong(len(parts))
    return max(0, int(_libc.process_vm_readv(pid, vectors[0], counts[0], vectors[1], counts[1], ctypes.c_ulong(0))))


def chunks(ranges: Iterable[Range], chunk_bytes: int) -> Iterator[tuple[int, list[Range]]]:
    """The pages of all ranges, one after the other, in pieces of this size: where each begins, and what is in it."""
    offset, room = 0, chunk_bytes
    parts: list[Range] = []
    for first, end in ranges:
        start = first
        while start < end:
            stop = min(end, start + room)
            parts.append((start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield offset, parts
                offset, parts, room = offset + chunk_bytes, [], chunk_bytes
    if parts:
        yield offset, parts
