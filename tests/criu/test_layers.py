"""Pages that an image leaves out must be in the images below it, and only there does criu look for them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from pycriu.images import pb

from snapshotd.api.errors import Damaged, Refused
from snapshotd.criu import below, layers, pagemap_image, verify
from snapshotd.criu.page_ranges import Range
from snapshotd.criu.pagemap_image import PAGE_BYTES, Pagemap, Pagemaps
from tests.criu.test_verify import PATHS, WHO, core, folder, here, ids, write

__all__ = ["folder", "here"]

BELOW = {8: 0, 9: 0}


def span(first: int, last: int) -> Range:
    return first * PAGE_BYTES, last * PAGE_BYTES


def put(folder: Path, name: str, number: int, present: list[Range], lower: list[Range], pages: str = "") -> None:
    (folder / name).write_bytes(pagemap_image.encode(Pagemap(number, present, lower)))
    size = sum(end - start for start, end in present)
    (folder / (pages or f"pages-{number}.img")).write_bytes(bytes(size))


ANONYMOUS, HEAP, OF_FILE = 0x201, 0x221, 0x41
_MM = ("start_code", "end_code", "start_data", "end_data", "start_stack", "start_brk", "brk", "arg_start", "arg_end")


def put_mappings(folder: Path, pid: int, *mappings: tuple[int, int, int]) -> None:
    """Each with its first and last page and its state."""
    numbers = dict.fromkeys((*(f"mm_{name}" for name in _MM), "mm_env_start", "mm_env_end", "exe_file_id"), 1)
    memory = pb.mm_entry(**numbers)
    for first, last, state in mappings:
        start, end = span(first, last)
        memory.vmas.add(start=start, end=end, pgoff=0, shmid=0, prot=3, flags=0x22, status=state, fd=-1)
    write(folder / f"mm-{pid}.img", "MM", memory)


def mappings(folder: Path, pid: int) -> list[tuple[int, int, int]]:
    content = (folder / f"mm-{pid}.img").read_bytes()
    memory = pb.mm_entry.FromString(content[12:])
    assert memory.exe_file_id == 1
    return [(vma.start // PAGE_BYTES, vma.end // PAGE_BYTES, vma.status) for vma in memory.vmas]


@pytest.fixture
def family(folder: Path) -> Path:
    """Process 7, which forked 8, which forked 9. 8 leaves out what 7 has, 9 what 7 and 8 have."""
    tree = [pb.pstree_entry(pid=pid, ppid=max(0, pid - 1) % 7 or 0, pgid=7, sid=7, threads=[pid]) for pid in (7, 8, 9)]
    tree[1].ppid, tree[2].ppid = 7, 8
    write(folder / "pstree.img", "PSTREE", *tree)
    for pid in (8, 9):
        write(folder / f"ids-{pid}.img", "IDS", ids())
        write(folder / f"core-{pid}.img", "CORE", core())
    for pid in (7, 8, 9):
        put_mappings(folder, pid, (1, 10, ANONYMOUS))
    put(folder, "pagemap-7.img", 1, [span(1, 10)], [])
    put(folder, "pagemap-8.img", 2, [span(3, 5)], [span(1, 3), span(6, 10)])
    put(folder, "pagemap-9.img", 3, [span(2, 3)], [span(1, 2), span(3, 5), span(6, 7)])
    return folder


def refusal(folder: Path, described: dict[int, int]) -> str:
    try:
        verify.must_match(folder, {pid: (WHO, {}) for pid in (7, 8, 9)}, PATHS, described)
    except Refused as found:
        return found.message
    return ""


def test_pages_of_a_process_are_looked_for_in_those_that_forked_it(family: Path) -> None:
    assert refusal(family, BELOW) == ""
    for _ in range(2):  # a restore that failed is tried again
        assert layers.build(Pagemaps(family), BELOW) == 2
    first, second = family / "parent", family / "parent" / "parent"
    for name, file in {
        first / "pagemap-8.img": "pagemap-7.img",
        first / "pages-1.img": "pages-1.img",
        first / "pagemap-9.img": "pagemap-8.img",
        first / "pages-2.img": "pages-2.img",
        second / "pagemap-9.img": "pagemap-7.img",
        second / "pages-1.img": "pages-1.img",
    }.items():
        assert name.samefile(family / file), name
    assert not (first / "pagemap-7.img").exists()
    assert not (second / "parent").exists()
    assert first.stat().st_mode & 0o777 == 0o700


def test_image_that_leaves_nothing_out_has_no_folders(family: Path) -> None:
    layers.build(Pagemaps(family), BELOW)
    assert layers.build(Pagemaps(family), {}) == 0
    assert not (family / "parent").exists()


def test_rounds_lie_below_the_process_that_they_are_of(family: Path) -> None:
    described = {7: 2, **BELOW}
    put(family, "pagemap-7.img", 1, [span(1, 2)], [span(2, 10)])
    for number, (present, lower) in enumerate((([span(2, 10)], []), ([span(4, 6)], [span(2, 4)])), 1):
        number_of = below.ahead_pages_id(7, number)
        put(family, f"ahead-pagemap-7-{number}.img", number_of, present, lower, f"ahead-pages-7-{number}.img")
    assert refusal(family, described) == (
        "image-content: pagemap-7.img leaves out the page at 6000, which no image has"
    ), "round 2 does not say that it takes the page from round 1"
    put(
        family,
        "ahead-pagemap-7-2.img",
        below.ahead_pages_id(7, 2),
        [span(4, 6)],
        [span(2, 4), span(6, 10)],
        "ahead-pages-7-2.img",
    )
    assert refusal(family, described) == ""
    assert layers.build(Pagemaps(family), described) == 4
    assert (family / "parent" / "pagemap-7.img").samefile(family / "ahead-pagemap-7-2.img")
    assert (family / "parent/parent/parent/parent/pagemap-9.img").samefile(family / "ahead-pagemap-7-1.img")
    pages = family / f"parent/parent/parent/parent/pages-{below.ahead_pages_id(7, 1)}.img"
    assert pages.samefile(family / "ahead-pages-7-1.img")


def test_mappings_with_shared_pages_get_common_borders(family: Path) -> None:
    """Process 8 has protected pages 4 and 5 and got more memory up to 20; its parent's heap begins there."""
    put_mappings(family, 7, (1, 10, ANONYMOUS), (20, 30, HEAP), (40, 50, OF_FILE))
    put_mappings(family, 8, (1, 4, ANONYMOUS), (4, 6, ANONYMOUS), (6, 15, ANONYMOUS), (20, 25, HEAP), (40, 45, OF_FILE))
    put_mappings(family, 9, (1, 15, ANONYMOUS), (20, 30, HEAP))
    layers.build(Pagemaps(family), BELOW)
    common = [(1, 4, ANONYMOUS), (4, 6, ANONYMOUS), (6, 10, ANONYMOUS)]
    assert mappings(family, 7) == [*common, (20, 30, HEAP), (40, 50, OF_FILE)]
    assert mappings(family, 8) == [*common, (10, 15, ANONYMOUS), (20, 25, HEAP), (40, 45, OF_FILE)]
    assert mappings(family, 9) == [*common, (10, 15, ANONYMOUS), (20, 30, HEAP)], "nothing of the heap is shared"


def test_first_page_of_a_mapping_that_criu_would_miss_is_split_off(family: Path) -> None:
    """Process 8 has a mapping of its own before the one that it shares; process 9 has not, and shares that one with 8."""
    for pid in (7, 9):
        put_mappings(family, pid, (3, 10, ANONYMOUS), (40, 50, OF_FILE))
    put_mappings(family, 8, (1, 3, ANONYMOUS), (3, 10, ANONYMOUS), (40, 50, OF_FILE))
    layers.build(Pagemaps(family), BELOW)
    parts = [(3, 4, ANONYMOUS), (4, 10, ANONYMOUS), (40, 50, OF_FILE)]
    assert mappings(family, 7) == mappings(family, 9) == parts
    assert mappings(family, 8) == [(1, 3, ANONYMOUS), *parts]


def test_processes_of_different_programs_are_not_split(family: Path) -> None:
    put_mappings(family, 8, (1, 4, ANONYMOUS), (4, 10, ANONYMOUS))
    for pid, program in ((7, 1), (8, 2), (9, 3)):
        content = (family / f"mm-{pid}.img").read_bytes()
        memory = pb.mm_entry.FromString(content[12:])
        memory.exe_file_id = program
        write(family / f"mm-{pid}.img", "MM", memory)
    before = [(family / f"mm-{pid}.img").read_bytes() for pid in (7, 8, 9)]
    layers.build(Pagemaps(family), BELOW)
    assert [(family / f"mm-{pid}.img").read_bytes() for pid in (7, 8, 9)] == before


def test_only_pages_that_several_processes_read_are_kept(family: Path) -> None:
    layers.build(Pagemaps(family), BELOW)
    kept = list(struct.iter_unpack("=QQQ", (family / layers.KEPT).read_bytes()))
    first, second = ((family / f"pages-{number}.img").stat().st_ino for number in (1, 2))
    assert {inode for inode, _, _ in kept} == {first, second}
    assert [(start // PAGE_BYTES, end // PAGE_BYTES) for inode, start, end in kept if inode == first] == [
        (0, 2),
        (5, 9),
    ]
    assert [(start // PAGE_BYTES, end // PAGE_BYTES) for inode, start, end in kept if inode == second] == [(0, 2)]


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a page that no process has": (
        lambda folder: put(folder, "pagemap-9.img", 3, [], [span(5, 6)]),
        "pagemap-9.img leaves out the page at 5000, which no image has",
    ),
    "a page that would be below the first process": (
        lambda folder: put(folder, "pagemap-7.img", 1, [span(1, 9)], [span(9, 10)]),
        "leaves out the page at 9000, which no image has",
    ),
    "more pages than there are": (
        lambda folder: (folder / "pages-1.img").write_bytes(bytes(PAGE_BYTES)),
        "pagemap-7.img has more pages than pages-1.img",
    ),
    "pages of a file that is not there": (
        lambda folder: (folder / "pages-1.img").unlink(),
        "the image cannot be read: it lacks pages-1.img",
    ),
    "a process without a pagemap": (
        lambda folder: (folder / "pagemap-8.img").unlink(),
        "the image cannot be read: it lacks pagemap-8.img",
    ),
    "pages of a round under a number of criu's": (
        lambda folder: put(folder, "pagemap-8.img", below.ahead_pages_id(7, 1), [span(3, 5)], [span(1, 3)]),
        "the image cannot be read: pagemap-8.img: pagemap-8.img has the id",
    ),
    "a round that was not described": (
        lambda folder: put(folder, "ahead-pagemap-8-1.img", 1, [], [], "ahead-pages-8-1.img"),
        "the image contains ahead-pagemap-8-1.img, which the source did not describe",
    ),
    "a process that is its own ancestor": (
        lambda folder: write(
            folder / "pstree.img",
            "PSTREE",
            *(
                pb.pstree_entry(pid=pid, ppid=parent, pgid=7, sid=7, threads=[pid])
                for pid, parent in ((7, 0), (8, 9), (9, 8))
            ),
        ),
        "too many images lie below pagemap-8.img",
    ),
    "something else than a pagemap": (
        lambda folder: (folder / "pagemap-8.img").write_bytes(b"pagemap"),
        "pagemap-8.img: it does not begin like a pagemap",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_pagemap_is_refused(family: Path, forgery: str) -> None:
    change, expected = FORGERIES[forgery]
    change(family)
    assert expected in refusal(family, BELOW)


def test_pagemaps_of_a_rank_that_leaves_nothing_out_are_not_read(family: Path) -> None:
    (family / "pagemap-8.img").write_bytes(b"pagemap")
    assert refusal(family, {}) == ""


def test_file_that_would_replace_another_in_a_layer_is_refused(family: Path) -> None:
    """Two pagemaps may name the same pages; then the link exists already. Two files may not have the same name."""
    put(family, "ahead-pagemap-8-1.img", 1, [span(1, 10)], [], "ahead-pages-8-1.img")
    with pytest.raises(Damaged, match="has the id 1"):
        layers.build(Pagemaps(family), {8: 1, 9: 0})
