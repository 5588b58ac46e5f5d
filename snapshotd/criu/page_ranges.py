"""Sets of memory pages as sorted lists of address ranges, `(start, end)`, that neither touch nor overlap.

A rank has millions of pages in few ranges. Addresses are bytes and multiples of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
Ranges = Sequence[Range]


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
    first = second = 0
    while first < len(left) and second < len(right):
        start = max(left[first][0], right[second][0])
        end = min(left[first][1], right[second][1])
        if start < end:
            found.append((start, end))
        if left[first][1] < right[second][1]:
            first += 1
        else:
            second += 1
    return found


def without(ranges: Ranges, taken: Ranges) -> list[Range]:
    """The pages of `ranges` that are not in `taken`."""
    found: list[Range] = []
    at = 0
    for start, end in ranges:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        after = at
        while after < len(taken) and taken[after][0] < end:
            if start < taken[after][0]:
                found.append((start, taken[after][0]))
            start = taken[after][1]
            after += 1
        if start < end:
            found.append((start, end))
    return found


def size_bytes(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)
