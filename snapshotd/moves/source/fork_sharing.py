"""Finds the pages that the processes of a frozen rank share since a fork, so that each of them is sent once.

A page of a process is left out of its image if its parent has the same page frame at the same address: the target takes it
from the parent's image (snapshotd/criu/below.py), and criu's restore shares it again. What a process shares with no parent,
such as pages that only two siblings share, is sent for each of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from snapshotd.criu import page_ranges
from snapshotd.criu.below import Layer
from snapshotd.criu.page_ranges import Range, Ranges
from snapshotd.proc import stat, status
from snapshotd.proc.files import GONE, parse_fields, process_path, read_text
from snapshotd.proc.page_frames import ENTRY_BYTES, PAGE_BYTES, NotSupported, PageFrames, same_frames

log = logging.getLogger(__name__)

#: A process that shares less is dumped whole: criu restores a process more quickly if nothing lies below its image.
LEAST_BYTES = 1 << 20
#: A process whose memory is in more pieces is dumped whole, and so are its children: pagemaps have a limit on the target.
MOST_PIECES = 300_000
#: Each generation is a folder on the target (`below.MAX_LAYERS`).
MOST_GENERATIONS = 32


class ForkSharing:
    """A `Below` for the processes of one frozen rank. `without` are left alone: their pages are sent in another way."""

    def __init__(self, pids: Iterable[int], without: Iterable[int] = ()) -> None:
        self._pids, self._without = list(pids), frozenset(without)

    def layers(self) -> Sequence[Layer]:
        children: dict[int, list[int]] = defaultdict(list)
        for pid in self._pids:
            with contextlib.suppress(*GONE):
                if (parent := stat.read(pid).parent) in self._pids and pid not in self._without:
                    children[parent].append(pid)
        try:
            found = [layer for parent, ones in children.items() for layer in _shared_with(parent, ones)]
            return _without_deep(found)
        except (NotSupported, OSError) as error:
            log.info("pages that forked processes share are sent for each of them: %s", error)
            return []


def _shared_with(parent: int, children: list[int]) -> Iterator[Layer]:
    """The parent's frames are read before and after those of its children: the kernel may move pages meanwhile."""
    number = status.read(parent).inner_pid
    with PageFrames(parent) as frames:
        theirs = frames.private()
        if len(theirs) > MOST_PIECES:
            return
        before = {one: frames.read(*one) for one in theirs}
        shared = {child: _same(child, before) for child in children}
        stable = [part for one in theirs for part in _runs(one[0], before[one], frames.read(*one))]
    for child, pages in shared.items():
        kept = page_ranges.common(pages, page_ranges.joined(stable))
        if page_ranges.size_bytes(kept) >= LEAST_BYTES:
            yield Layer(pid=status.read(child).inner_pid, pages=kept, parent=number)


def _without_deep(layers: list[Layer]) -> list[Layer]:
    parents = {layer.pid: layer.parent for layer in layers}

    def generation(pid: int | None) -> int:
        number = 0
        while pid in parents and number <= MOST_GENERATIONS:
            pid, number = parents[pid], number + 1
        return number

    return [layer for layer in layers if generation(layer.pid) <= MOST_GENERATIONS]


def _same(pid: int, parents: dict[Range, bytes]) -> Ranges:
    """The pages of the process that have the frame which its parent has at that address."""
    try:
        if int(parse_fields(read_text(process_path(pid, "status"))).get("HugetlbPages", "0 kB").split()[0]):
            return []  # criu restores reserved huge pages from the image of the process itself only
        with PageFrames(pid) as frames:
            found: list[Range] = []
            if len(own := frames.private()) > MOST_PIECES:
                return []
            theirs = iter(parents.items())
            (start, end), entries = next(theirs, ((0, 0), b""))
            for first, last in page_ranges.common(own, list(parents)):
                while end <= first:
                    (start, end), entries = next(theirs)
                part = entries[_entry(first - start) : _entry(last - start)]
                found += _runs(first, part, frames.read(first, last))
            return page_ranges.joined(found)
    except GONE:
        return []  # it has ended, and has no memory


def _runs(start: int, left: bytes, right: bytes) -> Iterator[Range]:
    for first, last in same_frames(left, right):
        yield start + first * PAGE_BYTES, start + last * PAGE_BYTES


def _entry(length: int) -> int:
    """Where the entry of the page at this distance begins."""
    return length // PAGE_BYTES * ENTRY_BYTES
