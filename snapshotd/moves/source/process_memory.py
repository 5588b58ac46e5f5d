"""Reads anonymous pages of a frozen process, with several threads. Pages that it shares with relatives stay shared.

Invariant: what was read belongs to that process if `must_live` returns afterwards: it executes nothing while it is frozen,
and a process that has got its pid meanwhile has another start time. Everything blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from snapshotd.criu.page_ranges import Range
from snapshotd.proc.tree import Process


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
        at = 0
        for start, end in parts:
            until = at + end - start
            while at < until:
                # Not process_vm_readv: it gives the process a page of its own first where it shares one with a relative.
                count = os.preadv(self._fd, [view[at:until]], end - (until - at))
                if not count:
                    raise ProcessLookupError(errno.ESRCH, "it has ended")
                at += count


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
