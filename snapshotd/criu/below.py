"""Pages that the image of a process leaves out, because the target has them from elsewhere: they lie below it.

Two kinds of pages lie below the image of a process:
- those that it shares with its parent, which forked it: they are in the parent's image, at the same addresses;
- those that were sent past criu, before the freeze or beside its dump: they are in images of the process itself, one pair
  of files for each round. Of a page that is in several, the newest counts.
A process has pages of one kind only. Its parent may have the other, and so on: criu looks for a page in the image of the
process, then in the one below it, and so on down.

On the source, `Below` says before the dump which pages these are. criu is not shown them (shim/lib/criu/hidden_pages.c), so
that it neither reads nor writes them. After the dump `complete` adds them to the pagemaps, which are otherwise as criu wrote
them.

Invariants: a page that criu has written is taken from its own image, also if it lies below as well. Every page that lies
below exists there, or the dump fails. On the target, snapshotd/criu/layers.py makes the folders in which criu finds them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from snapshotd.api.errors import Internal, Where
from snapshotd.criu import page_ranges, pagemap_image
from snapshotd.criu.page_ranges import Ranges
from snapshotd.criu.pagemap_image import Pagemap

#: The file that tells the library in criu what to leave out: pid, start and end of each range, in order.
HIDDEN = "hidden-pages"
_RANGE = struct.Struct("=QQQ")
#: pages_id of the images that were sent before the freeze; criu itself counts from 1.
_AHEAD_IDS = 1 << 24
MAX_ROUNDS = 16
#: As in shim/lib/criu/rank.h.
MAX_LAYERS = 64
_AHEAD = re.compile(r"ahead-pagemap-(\d{1,9})-(\d{1,4})\.img")


@dataclass(frozen=True, slots=True)
class Layer:
    """What lies below the image of one process. Pids are those of the rank's own pid namespace."""

    pid: int
    pages: Ranges
    #: The process whose pages these are, its parent; None: they are its own, and were sent before the freeze.
    parent: int | None = None
    #: Only if `parent` is None: the pages of each round, the oldest first, as they lie in its file. Together they must have
    #: all of `pages`; a page that is in several is taken from the newest.
    rounds: Sequence[Ranges] = field(default=())


class Below(Protocol):
    """Something that knows pages which need not be in an image. Asked once, with the tree frozen. Blocking."""

    def layers(self) -> Sequence[Layer]: ...


def ahead_pages_name(pid: int, number: int) -> str:
    """The file with the pages of one round (1, 2, …), as it is sent before the freeze."""
    return f"ahead-pages-{pid}-{number}.img"


def ahead_pagemap_name(pid: int, number: int) -> str:
    """The pagemap of that file, which is sent with the image."""
    return f"ahead-pagemap-{pid}-{number}.img"


def ahead_pages_id(pid: int, number: int) -> int:
    return _AHEAD_IDS + pid * MAX_ROUNDS + number


def hide(folder: Path, layers: Iterable[Layer]) -> Path | None:
    """Writes the list of pages that criu is not shown; None if there are none."""
    ranges = [(layer.pid, start, end) for layer in layers for start, end in layer.pages]
    if not ranges:
        return None
    path = folder / HIDDEN
    path.write_bytes(b"".join(_RANGE.pack(*one) for one in sorted(ranges)))
    return path


def complete(folder: Path, layers: Iterable[Layer]) -> None:
    """Adds the pages that lie below to the pagemaps that criu has written into `folder`, and writes those of earlier rounds.

    Raises Internal, with the rank frozen on the source, if such a page is in no image: the rank must not be restored."""
    by_pid = {layer.pid: layer for layer in layers if layer.pages}
    maps: dict[int, Pagemap] = {}
    for pid in {*by_pid, *(layer.parent for layer in by_pid.values() if layer.parent is not None)}:
        path = folder / pagemap_image.name_of(pid)
        try:
            own = pagemap_image.decode(path.read_bytes())
        except (OSError, ValueError) as error:
            raise _incomplete(f"{path.name} cannot be read: {error}") from error
        if pid in by_pid:
            own = Pagemap(own.pages_id, own.present, page_ranges.without(by_pid[pid].pages, own.present))
            path.write_bytes(pagemap_image.encode(own))
        maps[pid] = own
    for layer in by_pid.values():
        if layer.parent is None:
            _write_rounds(folder, layer, maps[layer.pid].below)
        else:
            _must_have(f"process {layer.parent}", maps[layer.parent].has(), maps[layer.pid].below, layer.pid)


def _write_rounds(folder: Path, layer: Layer, wanted: Ranges) -> None:
    if len(layer.rounds) >= MAX_ROUNDS:
        raise _incomplete(f"process {layer.pid} has {len(layer.rounds)} rounds")
    lower: list[page_ranges.Range] = []
    for number, present in enumerate(layer.rounds, 1):
        pagemap = Pagemap(
            ahead_pages_id(layer.pid, number), list(present), below=page_ranges.without(lower, list(present))
        )
        (folder / ahead_pagemap_name(layer.pid, number)).write_bytes(pagemap_image.encode(pagemap))
        lower = pagemap.has()
    _must_have("no round", lower, wanted, layer.pid)


def _must_have(where: str, has: Ranges, wanted: Ranges, pid: int) -> None:
    if missing := page_ranges.without(wanted, has):
        raise _incomplete(f"the page of process {pid} at {missing[0][0]:x} should lie below its image: {where} has it")


def _incomplete(reason: str) -> Internal:
    return Internal(
        f"the image is incomplete: {reason}",
        remedy="the rank continues on its source; report this with the log of its daemon",
        where=Where.SOURCE_FROZEN,
    )


def size_bytes(layers: Iterable[Layer]) -> int:
    """What the images leave out."""
    return sum(page_ranges.size_bytes(layer.pages) for layer in layers)


def described(layers: Iterable[Layer]) -> dict[int, int]:
    """What the target is told: of each process whose image leaves out pages, how many rounds were sent before the freeze; 0:
    the pages are its parent's."""
    return {layer.pid: len(layer.rounds) if layer.parent is None else 0 for layer in layers if layer.pages}


def chain_of(pid: int, parents: Mapping[int, int], described: Mapping[int, int]) -> list[str]:
    """The names of the pagemaps in which criu has to look for pages of a process, its own first.

    `parents` has the parent of each process. Raises ValueError for a chain without an end."""
    chain = [pagemap_image.name_of(pid)]
    while pid in described:
        if rounds := min(described[pid], MAX_ROUNDS):
            chain += [ahead_pagemap_name(pid, number) for number in range(rounds, 0, -1)]
            break
        pid = parents.get(pid, 0)
        chain.append(pagemap_image.name_of(pid))
        if len(chain) + MAX_ROUNDS > MAX_LAYERS:
            raise ValueError(f"too many images lie below {chain[0]}")
    return chain


def pages_of(pagemap: str, pages_id: int) -> str:
    """The file with the pages of a pagemap of this name. Raises ValueError if it cannot have this id."""
    if found := _AHEAD.fullmatch(pagemap):
        pid, number = map(int, found.groups())
        if pages_id != ahead_pages_id(pid, number):
            raise ValueError(f"{pagemap} has the id {pages_id}")
        return ahead_pages_name(pid, number)
    if pages_id >= _AHEAD_IDS:
        raise ValueError(f"{pagemap} has the id {pages_id}")
    return pagemap_image.pages_name(pages_id)
