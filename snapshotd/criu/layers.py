"""Makes the folders in which criu finds the pages that an image leaves out (snapshotd/criu/below.py).

criu looks for such a page in the folder `parent` of the images, then in `parent` of that, and so on, always in the pagemap
of the process that it restores. So the first folder has, under the name of each process, the pagemap that lies below its own,
the second the one below that. All are links to files of the image: no page is stored twice.

criu removes each page from its file once it is restored. Those that several processes take from there must stay: the library
in criu is told which (shim/lib/criu/kept_pages.c).

The image must have been verified (image_content.py). Names are made of numbers alone, so no link leads out of the folder.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from pycriu import images

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import below, borders, page_ranges, pagemap_image
from snapshotd.criu.page_ranges import Range
from snapshotd.criu.pagemap_image import Pagemap, Pagemaps

KEPT = "kept-pages"
_PARENT = "parent"
_RANGE = struct.Struct("=QQQ")


def build(pagemaps: Pagemaps, described: Mapping[int, int]) -> int:
    """Makes the folders anew; returns how many there are. `described`: see `below.chain_of`. Blocking. Raises Damaged."""
    folder = pagemaps.folder
    shutil.rmtree(folder / _PARENT, ignore_errors=True)
    (folder / KEPT).unlink(missing_ok=True)
    if not described:
        return 0
    try:
        parents = _parents(folder)
        chains = [below.chain_of(pid, parents, described) for pid in described]
        for own, *lower in chains:
            layer = folder
            for name in lower:
                layer /= _PARENT
                layer.mkdir(mode=0o700, exist_ok=True)
                number = pagemaps[name].pages_id
                _link(folder / name, layer / own)
                _link(folder / below.pages_of(name, number), layer / pagemap_image.pages_name(number))
        _write_kept(folder, chains, pagemaps)
        shared = {pid: pagemaps[pagemap_image.name_of(pid)].below for pid, rounds in described.items() if not rounds}
        borders.align(folder, {pid: (parents[pid], pages) for pid, pages in shared.items()})
    except (OSError, ValueError) as error:
        raise Damaged(f"pages that an image leaves out cannot be found: {error}", where=Where.SOURCE_FROZEN) from error
    return max(len(chain) for chain in chains) - 1


def is_shared(folder: Path) -> bool:
    """Whether another image has a file of pages of this one, too, beside the folders that `build` makes. Blocking."""
    inside = Counter(path.stat().st_ino for path in folder.rglob("*pages-*.img"))
    return any(path.stat().st_nlink > inside[path.stat().st_ino] for path in folder.glob("*pages-*.img"))


def _parents(folder: Path) -> dict[int, int]:
    with (folder / "pstree.img").open("rb") as file:
        return {entry["pid"]: entry["ppid"] for entry in images.load(file)["entries"]}


def _link(file: Path, name: Path) -> None:
    """Raises ValueError if another file has the name already."""
    try:
        os.link(file, name, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samefile(file, name):
            raise ValueError(f"two files would be {name.name}") from None


def _write_kept(folder: Path, chains: list[list[str]], pagemaps: Mapping[str, Pagemap]) -> None:
    """Lists the pages that more than one process reads."""
    records = []
    for name, ranges in read_twice(chains, pagemaps).items():
        inode = (folder / below.pages_of(name, pagemaps[name].pages_id)).stat().st_ino
        records += [(inode, start, end) for start, end in _offsets(pagemaps[name].present, ranges)]
    (folder / KEPT).write_bytes(b"".join(_RANGE.pack(*one) for one in sorted(records)))


def read_twice(chains: list[list[str]], pagemaps: Mapping[str, Pagemap]) -> dict[str, list[Range]]:
    """The pages of each pagemap that are read for several processes."""
    taken: dict[str, list[list[Range]]] = defaultdict(list)
    for own, *lower in chains:
        wanted = pagemaps[own].below
        for name in lower:
            taken[name].append(page_ranges.common(wanted, pagemaps[name].present))
            wanted = page_ranges.without(wanted, taken[name][-1])
    twice = {name: _several(parts, read_already=not name.startswith("ahead-")) for name, parts in taken.items()}
    return {name: ranges for name, ranges in twice.items() if ranges}


def _several(parts: list[list[Range]], *, read_already: bool) -> list[Range]:
    """The pages that are in several of these sets. `read_already`: in any, because the process that has the pages in its own
    image reads them too."""
    if read_already:
        return page_ranges.joined(itertools.chain.from_iterable(parts))
    once: list[Range] = []
    found: list[Range] = []
    for part in parts:
        found += page_ranges.common(once, part)
        once = page_ranges.joined([*once, *part])
    return page_ranges.joined(found)


def _offsets(present: list[Range], pages: list[Range]) -> list[Range]:
    """Where these pages lie in the file, which has all of `present` in this order."""
    pieces = pagemap_image.located(present, pages)
    return page_ranges.joined((offset, offset + length) for offset, _, length in pieces)
