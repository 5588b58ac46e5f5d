"""Pages that lie below an image, and that criu does not restore: they are placed into the restored processes afterwards.

criu restores memory in one thread for each process. What a process has in files of its own (snapshotd/criu/below.py) is
placed by several at once instead (snapshotd/moves/target/placing.py). To criu such a page does not exist, so it leaves the
mapping empty there. All of them are of anonymous mappings, where an empty page reads as zero.

Left to criu are the files of a process if another one has any of their pages from it: criu makes children before it
restores their pages, so that they share them.

Left out is also what the kernel writes into a thread's memory whenever it runs, its restartable-sequences area: criu has
registered it by then, and a newer kernel takes what it has once written there for granted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pycriu import images
from pycriu.images import pb

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import below, image_entries, page_ranges, pagemap_image
from snapshotd.criu.page_ranges import Range
from snapshotd.criu.pagemap_image import Pagemap, Pagemaps, Piece

#: The first version of the area. A program may register a larger one.
_AREA_BYTES = 32


@dataclass(frozen=True, slots=True)
class PlacedPages:
    """What is placed into one process, which has this pid in its own pid namespace, from one file of the image."""

    pid: int
    file: str
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in self.pieces)


def take(pagemaps: Pagemaps, described: Mapping[int, int]) -> tuple[list[PlacedPages], dict[int, int]]:
    """Hides from criu what is to be placed; returns that, and what of `described` (see `below.chain_of`) is left to criu.

    The image must have been verified (image_content.py). Blocking. Raises Damaged."""
    if not any(described.values()):
        return [], dict(described)
    try:
        with (pagemaps.folder / "pstree.img").open("rb") as file:
            tree = {entry["pid"]: entry for entry in images.load(file)["entries"]}
        parents = {pid: entry["ppid"] for pid, entry in tree.items()}
        chains = {pid: below.chain_of(pid, parents, described)[1:] for pid in described}
        alone = [pid for pid, rounds in described.items() if rounds and not _is_needed(pid, chains, pagemaps)]
        found = [one for pid in alone for one in _take(pagemaps, pid, chains[pid], tree[pid]["threads"])]
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"pages that an image leaves out cannot be found: {error}", where=Where.SOURCE_FROZEN) from error
    return found, {pid: rounds for pid, rounds in described.items() if pid not in alone}


def _is_needed(pid: int, chains: Mapping[int, list[str]], pagemaps: Pagemaps) -> bool:
    """Whether another process has pages from the files of this one."""
    newest = chains[pid][0]
    for other, chain in chains.items():
        if other != pid and newest in chain:
            wanted = pagemaps[pagemap_image.name_of(other)].below
            for name in chain[: chain.index(newest)]:
                wanted = page_ranges.without(wanted, pagemaps[name].present)
            if wanted:
                return True
    return False


def _take(pagemaps: Pagemaps, pid: int, lower: list[str], threads: list[int]) -> Iterator[PlacedPages]:
    """What of one process is placed: criu finds only what is in its own image from now on."""
    name_of_own = pagemap_image.name_of(pid)
    own = pagemaps[name_of_own]
    wanted = page_ranges.without(own.below, page_ranges.joined(_written_by_the_kernel(pagemaps.folder, threads)))
    for name in lower:
        pagemap = pagemaps[name]
        pieces = list(pagemap_image.located(pagemap.present, wanted))
        wanted = page_ranges.without(wanted, pagemap.present)
        yield PlacedPages(pid, below.pages_of(name, pagemap.pages_id), pieces)
    if wanted:
        raise ValueError(f"the page at {wanted[0][0]:x} is nowhere")
    pagemaps.replace(name_of_own, Pagemap(own.pages_id, own.present, []))


def _written_by_the_kernel(folder: Path, threads: list[int]) -> Iterator[Range]:
    for number in threads:
        name = f"core-{number}.img"
        cores = image_entries.load(folder / name, pb.core_entry)
        if len(cores) != 1:
            raise ValueError(f"{name} has {len(cores)} entries")
        rseq = cores[0].thread_core.rseq_entry
        if area := rseq.rseq_abi_pointer:
            yield area, area + max(_AREA_BYTES, rseq.rseq_abi_size)
