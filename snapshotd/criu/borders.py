"""Gives the mappings of forked processes common borders, so that criu's restore shares their pages again.

criu shares the pages of a child with its parent only in mappings that begin and end at the same addresses in both. After a
fork, either of them may have changed the access to a part of a mapping, or have got more memory, which the kernel joined to
the mapping before it. Such mappings are split here, on the target, where the other process has a border.

criu also misses a mapping of a child if the one before it has no counterpart in the parent (prepare_cow_vmas_for). Of such a
mapping the first page is split off: criu then misses that page only.

The kernel joins the parts again when they are restored, if they are restored in the same way. Otherwise they remain, which
only mremap of a range with such a border notices: it fails, and allocators then copy. Only anonymous private memory is split,
and only where a process takes pages from its parent's image.
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
#: Each split of a parent's mappings may let criu miss one of another child.
_ROUNDS = 8
#: Of its flags: grows downwards; reserved huge pages.
_NOT_SPLIT = 0x100 | 0x40000


def align(folder: Path, shared: Mapping[int, tuple[int, Ranges]]) -> None:
    """Splits mappings of the processes in `shared`, which has the parent of each, and the pages that it takes from that one's
    image. Blocking. Raises Damaged."""
    memory = {pid: _Memory(folder / f"mm-{pid}.img") for pid in {*shared, *(parent for parent, _ in shared.values())}}
    pairs = [
        (memory[pid], memory[parent], pages)
        for pid, (parent, pages) in shared.items()
        if memory[pid].program == memory[parent].program  # criu shares nothing between others
    ]
    for own, parents_own, pages in pairs:
        borders = sorted(set(_differing(own.anonymous(), parents_own.anonymous(), pages)))
        for one in memory.values() if borders else ():
            one.split(borders)
    for _ in range(_ROUNDS):
        missed = {border for pair in pairs for border in _missed(*pair)}
        if not missed:
            break
        for one in memory.values():
            one.split(sorted(missed))
    for one in memory.values():
        one.store()


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

        self.program = int(self._entry.exe_file_id)
        self.mappings = [_copy(vma) for vma in self._entry.vmas]

    def anonymous(self) -> list[Range]:
        return [(int(vma.start), int(vma.end)) for vma in self.mappings if _is_anonymous(vma)]

    def split(self, borders: list[int]) -> None:
        self.mappings = [part for vma in self.mappings for part in _split(vma, borders)]

    def store(self) -> None:
        if len(self.mappings) == len(self._entry.vmas):
            return
        del self._entry.vmas[:]
        self._entry.vmas.extend(self.mappings)
        new = self._entry.SerializeToString()
        self._path.write_bytes(self._content[:_HEADER_BYTES] + _SIZE.pack(len(new)) + new + self._rest)


def _copy(vma: Any) -> Any:
    fresh = pb.vma_entry()
    fresh.CopyFrom(vma)
    return fresh


def _is_anonymous(vma: Any) -> bool:
    return vma.status & ~_HEAP == _ANONYMOUS and not vma.flags & _NOT_SPLIT


def _differing(own: Ranges, parents: Ranges, shared: Ranges) -> Iterator[int]:
    """The borders of mappings that have shared pages, and begin or end elsewhere in the parent."""
    both = set(own) & set(parents)
    mine, theirs = ([one for one in ranges if one not in both] for ranges in (own, parents))
    wanted = page_ranges.common(page_ranges.common(mine, theirs), shared)
    for ranges in (mine, theirs):
        yield from (border for one in _touched(ranges, wanted) for border in one)


def _missed(own: _Memory, parents_own: _Memory, shared: Ranges) -> Iterator[int]:
    """Where to split off the first page of each mapping with shared pages that both have, and that criu misses."""
    common = set(own.anonymous()) & set(parents_own.anonymous())
    found = set(_paired([int(vma.start) for vma in own.mappings], [int(vma.start) for vma in parents_own.mappings]))
    for start, end in _touched(sorted(common), shared):
        if start not in found and end - start > pagemap_image.PAGE_BYTES:
            yield start + pagemap_image.PAGE_BYTES


def _paired(own: list[int], parents: list[int]) -> Iterator[int]:
    """The starts of mappings that criu compares with the parent's, in the way in which it looks for them."""
    mine, theirs = 0, 0
    while mine < len(own) and theirs < len(parents):
        if own[mine] == parents[theirs]:
            yield own[mine]
        while mine < len(own) and own[mine] <= parents[theirs]:
            mine += 1
        while mine < len(own) and theirs < len(parents) and parents[theirs] < own[mine]:
            theirs += 1


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
        part = _copy(vma)
        part.start, part.end = start, end
        yield part
        start = end
