"""Gives the mappings of forked processes common borders, so that criu's restore shares their pages again.

criu shares the pages of a child with its parent only in mappings that begin and end at the same addresses in both. After a
fork, either of them may have changed the access to a part of a mapping, or have got more memory, which the kernel joined to
the mapping before it. Such mappings are split here, on the target, where the other process has a border. The kernel joins the
parts again when they are restored, unless they differ in more than their addresses.

Only anonymous private memory is split, and only where a process takes pages from its parent's image.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from pycriu.images import pb

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import page_ranges, pagemap_image
from snapshotd.criu.page_ranges import Range, Ranges

_HEADER_BYTES = 8  # two magic numbers
_SIZE = struct.Struct("<I")
#: Of a mapping's state: ordinary, and anonymous private memory; it may also be the heap.
_ANONYMOUS, _HEAP = 1 | 1 << 9, 1 << 5
#: Of its flags: grows downwards; reserved huge pages.
_NOT_SPLIT = 0x100 | 0x40000


def align(folder: Path, parents: Mapping[int, int]) -> None:
    """Splits mappings of the processes in `parents`, which has the parent of each. Blocking. Raises Damaged."""
    memory = {pid: _Memory(folder / f"mm-{pid}.img") for pid in {*parents, *parents.values()}}
    borders: set[int] = set()
    for pid, parent in parents.items():
        shared = pagemap_image.decode((folder / pagemap_image.name_of(pid)).read_bytes()).below
        borders.update(_differing(memory[pid].anonymous(), memory[parent].anonymous(), shared))
    for one in memory.values() if borders else ():
        one.split(sorted(borders))


class _Memory:
    """The mappings of one process."""

    def __init__(self, path: Path) -> None:
        self._path, self._content = path, path.read_bytes()
        try:
            (size,) = _SIZE.unpack_from(self._content, _HEADER_BYTES)
            begin = _HEADER_BYTES + _SIZE.size
            self._rest = self._content[begin + size :]
            self._entry = pb.mm_entry.FromString(self._content[begin : begin + size])
        except (struct.error, DecodeError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error

    def anonymous(self) -> list[Range]:
        return [(int(vma.start), int(vma.end)) for vma in self._entry.vmas if _is_anonymous(vma)]

    def split(self, borders: list[int]) -> None:
        parts = [part for vma in self._entry.vmas for part in _split(vma, borders)]
        if len(parts) == len(self._entry.vmas):
            return
        del self._entry.vmas[:]
        self._entry.vmas.extend(parts)
        new = self._entry.SerializeToString()
        self._path.write_bytes(self._content[:_HEADER_BYTES] + _SIZE.pack(len(new)) + new + self._rest)


def _is_anonymous(vma: Any) -> bool:
    return vma.status & ~_HEAP == _ANONYMOUS and not vma.flags & _NOT_SPLIT


def _differing(own: Ranges, parents: Ranges, shared: Ranges) -> Iterator[int]:
    """The borders of mappings that have shared pages, and begin or end elsewhere in the parent."""
    both = set(own) & set(parents)
    mine, theirs = ([one for one in ranges if one not in both] for ranges in (own, parents))
    wanted = page_ranges.common(page_ranges.common(mine, theirs), shared)
    for ranges in (mine, theirs):
        yield from (border for one in _touched(ranges, wanted) for border in one)


def _touched(ranges: Iterable[Range], wanted: Ranges) -> Iterator[Range]:
    """Those of the ranges that have something in common with `wanted`."""
    starts = [start for start, _ in wanted]
    for start, end in ranges:
        before = bisect_right(starts, end - 1)
        if before and wanted[before - 1][1] > start:
            yield start, end


def _split(vma: Any, borders: list[int]) -> Iterator[Any]:
    inside = (
        borders[bisect_right(borders, vma.start) : bisect_right(borders, vma.end - 1)] if _is_anonymous(vma) else []
    )
    ends = [*inside, int(vma.end)]
    start = int(vma.start)
    for end in ends:
        part = pb.vma_entry()
        part.CopyFrom(vma)
        part.start, part.end = start, end
        yield part
        start = end
