"""Finds the pages that the processes of a frozen rank share since a fork, so that each of them is sent once.

A page of a process is left out of its image if its parent has the same page frame at the same address: the target takes it
from the parent's image (snapshotd/criu/below.py), and criu's restore shares it again. What a process shares with no parent,
such as pages that only two siblings share, is sent for each of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from snapshotd.criu import page_ranges
from snapshotd.criu.below import Layer
from snapshotd.criu.page_ranges import Ranges
from snapshotd.proc import stat, status
from snapshotd.proc.files import GONE, parse_fields, process_path, read_text
from snapshotd.proc.page_frames import PAGE_BYTES, Frames, NotSupported, PageFrames

log = logging.getLogger(__name__)

#: A process that shares less is dumped whole: criu restores a process more quickly if nothing lies below its image.
LEAST_BYTES = 1 << 20
#: A process whose memory is in more pieces is dumped whole, and so are its children: pagemaps have a limit on the target.
MOST_PIECES = 300_000
#: Frames are read across gaps of this size, because a system call takes longer than what the kernel says about them.
BRIDGED_BYTES = 1 << 20
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
        if len(wanted := frames.private()) > MOST_PIECES:
            return
        spans = page_ranges.bridged(wanted, BRIDGED_BYTES)
        theirs = Frames(spans, before := frames.read(spans), wanted)
        with ThreadPoolExecutor(min(len(children), os.cpu_count() or 1), "page frames") as threads:
            shared = list(threads.map(lambda child: _same(child, theirs), children))
        stable = None if (after := frames.read(spans)) == before else theirs.same(after)
    for child, pages in zip(children, shared, strict=True):
        kept = pages if stable is None else page_ranges.common(pages, stable)
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


def _same(pid: int, parents: Frames) -> Ranges:
    """The pages of the process that have the frame which its parent has at that address. As they are the parent's, they are
    such of an ordinary private mapping here too."""
    try:
        fields = parse_fields(read_text(process_path(pid, "status")))
        if _bytes(fields, "HugetlbPages"):
            return []  # criu restores reserved huge pages from the image of the process itself only
        with PageFrames(pid) as frames:
            if _bytes(fields, "RssAnon") > MOST_PIECES * PAGE_BYTES and len(frames.private()) > MOST_PIECES:
                return []
            return parents.same(frames.read(parents.spans))
    except GONE:
        return []  # it has ended, and has no memory


def _bytes(fields: Mapping[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) << 10
