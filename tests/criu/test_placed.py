"""Pages of its own that a process has in files are hidden from criu, and each is found in the newest file that has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycriu.images import pb

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import below, layers, page_ranges, pagemap_image, placed
from snapshotd.criu.page_ranges import Range
from snapshotd.criu.pagemap_image import PAGE_BYTES, Pagemap, Pagemaps, Piece
from snapshotd.criu.placed import PlacedPages
from tests.criu.test_layers import family, put, span
from tests.criu.test_verify import core, folder, write

__all__ = ["family", "folder"]


def put_round(folder: Path, pid: int, number: int, present: list[Range], lower: list[Range] | None = None) -> None:
    pages_id, pages = below.ahead_pages_id(pid, number), below.ahead_pages_name(pid, number)
    put(folder, below.ahead_pagemap_name(pid, number), pages_id, present, lower or [], pages)


def put_threads(folder: Path, pid: int, *areas: tuple[int, int]) -> None:
    """A thread for each address and size of a restartable-sequences area."""
    numbers = [pid, *range(100, 99 + len(areas))]
    write(folder / "pstree.img", "PSTREE", pb.pstree_entry(pid=pid, ppid=0, pgid=pid, sid=pid, threads=numbers))
    for number, (address, size) in zip(numbers, areas, strict=True):
        thread = core()
        area = thread.thread_core.rseq_entry
        area.rseq_abi_pointer, area.rseq_abi_size, area.signature = address, size, 0x53053053
        write(folder / f"core-{number}.img", "CORE", thread)


def pagemap(folder: Path, pid: int) -> Pagemap:
    return pagemap_image.decode((folder / f"pagemap-{pid}.img").read_bytes())


def pages(offset: int, first: int, last: int) -> Piece:
    """From this page of the file on."""
    return offset * PAGE_BYTES, first * PAGE_BYTES, (last - first) * PAGE_BYTES


@pytest.fixture
def precopied(family: Path) -> Path:
    """Process 7 has written to its pages 1 and 5 since its only round was sent."""
    put(family, "pagemap-7.img", 1, [span(1, 2), span(5, 6)], [span(2, 5), span(6, 8), span(20, 22)])
    put_round(family, 7, 1, [span(1, 8), span(20, 30)])
    return family


# ---------------------------------------------------------------------- where pages lie in a file


@pytest.mark.parametrize(
    ("present", "wanted", "pieces"),
    [
        ([], [], []),
        ([], [span(1, 2)], []),
        ([span(1, 2)], [], []),
        ([span(4, 9)], [span(4, 9)], [pages(0, 4, 9)]),
        ([span(4, 9)], [span(5, 6), span(8, 9)], [pages(1, 5, 6), pages(4, 8, 9)]),
        (
            [span(1, 3), span(7, 9), span(12, 20)],
            [span(2, 8), span(15, 30)],
            [pages(1, 2, 3), pages(2, 7, 8), pages(7, 15, 20)],
        ),
        ([span(1, 3), span(7, 9)], [span(3, 7), span(9, 10)], []),
    ],
)
def test_pages_are_found_in_a_file(present: list[Range], wanted: list[Range], pieces: list[Piece]) -> None:
    assert list(pagemap_image.located(present, wanted)) == pieces


SETS = st.sets(st.integers(0, 40))


@given(SETS, SETS)
def test_every_page_is_found_where_it_was_stored(present: set[int], wanted: set[int]) -> None:
    ranges = [page_ranges.joined(span(page, page + 1) for page in chosen) for chosen in (present, wanted)]
    found = {
        (address + at) // PAGE_BYTES: (offset + at) // PAGE_BYTES
        for offset, address, length in pagemap_image.located(*ranges)
        for at in range(0, length, PAGE_BYTES)
    }
    assert found == {page: offset for offset, page in enumerate(sorted(present)) if page in wanted}


# ---------------------------------------------------------------------- what is hidden from criu


def test_pages_of_a_process_s_own_are_placed_and_hidden_from_criu(precopied: Path) -> None:
    """Only those that are wanted, although the file has more: from it others were left out."""
    found, left = placed.take(Pagemaps(precopied), {7: 1})
    assert found == [PlacedPages(7, "ahead-pages-7-1.img", [pages(1, 2, 5), pages(5, 6, 8), pages(7, 20, 22)])]
    assert found[0].bytes == 7 * PAGE_BYTES
    assert left == {}
    assert pagemap(precopied, 7) == Pagemap(1, [span(1, 2), span(5, 6)], [])


def test_newest_round_wins(precopied: Path) -> None:
    put_round(precopied, 7, 2, [span(3, 4), span(7, 10)], [span(1, 3), span(4, 7), span(20, 30)])
    found, left = placed.take(Pagemaps(precopied), {7: 2})
    assert found == [
        PlacedPages(7, "ahead-pages-7-2.img", [pages(0, 3, 4), pages(1, 7, 8)]),
        PlacedPages(7, "ahead-pages-7-1.img", [pages(1, 2, 3), pages(3, 4, 5), pages(5, 6, 7), pages(7, 20, 22)]),
    ]
    assert left == {}


@pytest.mark.parametrize(
    ("described", "own"),
    [
        ({7: 1, 8: 0}, []),
        ({7: 1, 8: 0, 9: 0}, []),
        ({7: 1, 8: 1, 9: 0}, [7]),  # 9 takes pages from 8, which has none from 7
        ({7: 1, 8: 0, 9: 1}, [9]),
        ({7: 1, 8: 1, 9: 1}, [7, 8, 9]),
    ],
)
def test_pages_that_a_child_takes_are_left_to_criu(precopied: Path, described: dict[int, int], own: list[int]) -> None:
    for pid in (8, 9):
        put_round(precopied, pid, 1, [span(1, 10)])
    before = {pid: pagemap(precopied, pid) for pid in (7, 8, 9)}
    found, left = placed.take(Pagemaps(precopied), described)
    assert sorted(one.pid for one in found) == own
    assert left == {pid: rounds for pid, rounds in described.items() if pid not in own}
    for pid, was in before.items():
        assert pagemap(precopied, pid) == (Pagemap(was.pages_id, was.present, []) if pid in own else was)


@pytest.mark.parametrize(
    ("child", "grandchild", "own"),
    [
        ([span(1, 2), span(5, 6)], [span(1, 2)], [7]),  # both are in the image of 7
        ([span(1, 2), span(20, 21)], [], []),
        ([], [span(21, 22)], []),
        ([], [span(30, 31)], [7]),  # which 8 has in its own image, as the others are in that of 7
    ],
)
def test_pages_that_nobody_shares_are_placed_although_others_are_shared(
    precopied: Path, child: list[Range], grandchild: list[Range], own: list[int]
) -> None:
    put(precopied, "pagemap-8.img", 2, [span(30, 31)], child)
    put(precopied, "pagemap-9.img", 3, [], grandchild)
    put_round(precopied, 7, 1, [span(1, 8)])
    put_round(precopied, 7, 2, [span(20, 30)], [span(1, 8)])
    pagemaps = Pagemaps(precopied)
    found, left = placed.take(pagemaps, {7: 2, 8: 0, 9: 0})
    assert [one.file for one in found] == ["ahead-pages-7-2.img", "ahead-pages-7-1.img"][: 2 * len(own)]
    assert left == ({8: 0, 9: 0} if own else {7: 2, 8: 0, 9: 0})
    assert layers.build(pagemaps, left) == (2 if own else 4), "criu looks for pages in no file that was placed"


@pytest.mark.parametrize(
    ("areas", "without"),
    [
        ([(0, 0)], []),  # the thread has none
        ([(3 * PAGE_BYTES + 96, 32)], [(3 * PAGE_BYTES + 96, 3 * PAGE_BYTES + 128)]),
        ([(3 * PAGE_BYTES + 96, 0)], [(3 * PAGE_BYTES + 96, 3 * PAGE_BYTES + 128)]),  # of the first version
        ([(3 * PAGE_BYTES, 64)], [(3 * PAGE_BYTES, 3 * PAGE_BYTES + 64)]),
        (  # one at the end of a run of pages, one in a page that criu restores
            [(7 * PAGE_BYTES - 32, 32), (8 * PAGE_BYTES - 32, 32), (5 * PAGE_BYTES + 64, 32)],
            [(7 * PAGE_BYTES - 32, 7 * PAGE_BYTES), (8 * PAGE_BYTES - 32, 8 * PAGE_BYTES)],
        ),
    ],
)
def test_what_the_kernel_writes_for_a_thread_is_left_out(
    precopied: Path, areas: list[tuple[int, int]], without: list[Range]
) -> None:
    put_threads(precopied, 7, *areas)
    ((one,), _) = placed.take(Pagemaps(precopied), {7: 1})
    wanted = page_ranges.without([span(2, 5), span(6, 8), span(20, 22)], without)
    assert [(address, address + length) for _, address, length in one.pieces] == wanted
    first = {**dict.fromkeys(range(1, 8), 1), **dict.fromkeys(range(20, 30), 13)}  # its page 8 has address 20
    for offset, address, _ in one.pieces:
        assert address - offset == first[address // PAGE_BYTES] * PAGE_BYTES
    assert pagemap(precopied, 7).below == [], "criu finds none of that page: it leaves the area to the kernel"


def truncated(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-3])


FAILURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no core": (lambda folder: (folder / "core-7.img").unlink(), "core-7.img"),
    "a core that ends early": (lambda folder: truncated(folder, "core-7.img"), "core-7.img ends early"),
    "a core without an entry": (
        lambda folder: (folder / "core-7.img").write_bytes(bytes(8)),
        "core-7.img has 0 entries",
    ),
    "something else than a core": (
        lambda folder: (folder / "core-7.img").write_bytes(b"x" * 99),
        "core-7.img ends early",
    ),
    "no pagemap": (lambda folder: (folder / "pagemap-7.img").unlink(), "pagemap-7.img"),
    "a pagemap that ends early": (lambda folder: truncated(folder, "pagemap-7.img"), "ends early"),
    "something else than a pagemap": (
        lambda folder: (folder / "pagemap-7.img").write_bytes(b"pagemap"),
        "does not begin like a pagemap",
    ),
    "no round": (lambda folder: (folder / "ahead-pagemap-7-1.img").unlink(), "ahead-pagemap-7-1.img"),
    "a round that ends early": (lambda folder: truncated(folder, "ahead-pagemap-7-1.img"), "ends early"),
    "a round with another's pages": (
        lambda folder: put(folder, "ahead-pagemap-7-1.img", below.ahead_pages_id(8, 1), [span(1, 30)], []),
        "ahead-pagemap-7-1.img has the id",
    ),
    "a page that is in no round": (lambda folder: put_round(folder, 7, 1, [span(1, 21)]), "page at 15000 is nowhere"),
    "a process that is not in the tree": (lambda folder: put_threads(folder, 8, (0, 0)), ": 7"),
    "no tree": (lambda folder: (folder / "pstree.img").unlink(), "pstree.img"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_image_from_which_pages_cannot_be_placed_is_damaged(precopied: Path, failure: str) -> None:
    change, expected = FAILURES[failure]
    change(precopied)
    with pytest.raises(Damaged) as caught:
        placed.take(Pagemaps(precopied), {7: 1})
    assert expected in caught.value.message
    assert caught.value.where is Where.SOURCE_FROZEN


@pytest.mark.parametrize("described", [{}, {8: 0, 9: 0}])
def test_image_without_pages_of_a_process_s_own_is_not_read(tmp_path: Path, described: dict[int, int]) -> None:
    assert placed.take(Pagemaps(tmp_path / "none"), described) == ([], described)
