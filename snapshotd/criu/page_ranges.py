"""Sets of memory pages as sorted lists of address ranges, `(start, end)`, that neither touch nor overlap.

A rank has millions of pages in few ranges. Addresses are bytes and multiples of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
Ranges = Sequence[Range]
#: Lies behind all memory.
_NO_MORE = (1 << 64, 1 << 64)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The pages of all these ranges, which may overlap and be in any order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif start < end:
            found.append((start, end))
    return found


def common(left: Ranges, right: Ranges) -> list[Range]:
    """The pages that are in both sets."""
    found: list[Range] = []
    lefts, rights = iter(left), iter(right)
    try:
        (start, end), (first, last) = next(lefts), next(rights)
        while True:
            if end <= first:
                start, end = next(lefts)
            elif last <= start:
                first, last = next(rights)
            elif end < last:
                found.append((start if start > first else first, end))  # noqa: FURB136 - max() would take twice as long
                start, end = next(lefts)
            else:
                found.append((start if start > first else first, last))  # noqa: FURB136
                first, last = next(rights)
    except StopIteration:
        return found


def without(ranges: Ranges, taken: Ranges) -> list[Range]:
    """The pages of `ranges` that are not in `taken`."""
    found: list[Range] = []
    others = iter(taken)
    first, last = next(others, _NO_MORE)
    for start, end in ranges:
        while last <= start:
            first, last = next(others, _NO_MORE)
        while first < end:
            if start < first:
                found.append((start, first))
            start = last
            if last >= end:
                break
            first, last = next(others, _NO_MORE)
        if start < end:
            found.append((start, end))
    return found


def bridged(ranges: Ranges, gap_bytes: int) -> list[Range]:
    """The ranges with the gaps between them that have at most this size: fewer, longer ones."""
    found: list[Range] = []
    for start, end in ranges:
        if found and start - found[-1][1] <= gap_bytes:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def size_bytes(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)
