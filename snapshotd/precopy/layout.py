"""Where each page of a process is in its file on the target, and which pages are there.

The file has one slot for each page of the ranges that were eligible when tracking began, one range after the other. They are
in order of address, as criu's pages image has to be. Ranges are never added later: all slots behind them would move.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from snapshotd.precopy.messages import CHUNK_BYTES, PAGE_BYTES

Range = tuple[int, int]

#: Most ranges, and most address space, that are followed. Programs reserve terabytes that they never use.
MAX_RANGES = 4096
MAX_BYTES = 1 << 37


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same addresses, with adjacent ranges as one."""
    found: list[Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


class Layout:
    def __init__(self, ranges: list[Range], *, marks: bool = False) -> None:
        """Sorted, and not overlapping. `marks`: with memory for which pages were sent."""
        self.ranges = ranges
        self._starts = [start for start, _ in ranges]
        self._offsets = []
        self.size_bytes = 0
        for start, end in ranges:
            self._offsets.append(self.size_bytes)
            self.size_bytes += end - start
        self._sent = bytearray(self.size_bytes // PAGE_BYTES if marks else 0)

    def within(self, start: int, end: int) -> Iterator[Range]:
        """The parts of an address range that have slots."""
        index = max(0, bisect_right(self._starts, start) - 1)
        for first, last in self.ranges[index:]:
            if first >= end:
                return
            if last > start:
                yield max(start, first), min(end, last)

    def chunks(self, written: Iterable[Range]) -> Iterator[tuple[int, int, int, list[Range]]]:
        """Groups sorted ranges: offset of a chunk in the file, its length, its address, and the ranges in it."""
        current: tuple[int, int, int, list[Range]] | None = None
        for start, end in written:
            index = bisect_right(self._starts, start) - 1
            first, last = self.ranges[index]
            while start < end:
                begin = start - (start - first) % CHUNK_BYTES
                stop = min(begin + CHUNK_BYTES, last)
                if current is None or current[2] != begin:
                    if current is not None:
                        yield current
                    current = (self._offsets[index] + begin - first, stop - begin, begin, [])
                current[3].append((start, min(end, stop)))
                start = min(end, stop)
        if current is not None:
            yield current

    def mark(self, start: int, end: int, *, sent: bool) -> None:
        page = self._page(start)
        count = (end - start) // PAGE_BYTES
        self._sent[page : page + count] = (b"\1" if sent else b"\0") * count

    def sent(self, clean: Iterable[tuple[int, bytes]]) -> bytes:
        """A byte for each slot: 1 if its page was sent, and is among these clean ones, which come as runs, by address."""
        found = bytearray(len(self._sent))
        for start, flags in clean:
            page = self._page(start)
            found[page : page + len(flags)] = flags
        both = int.from_bytes(found, "little") & int.from_bytes(self._sent, "little")
        return both.to_bytes(len(found), "little")

    def _page(self, address: int) -> int:
        index = bisect_right(self._starts, address) - 1
        return (self._offsets[index] + address - self._starts[index]) // PAGE_BYTES
