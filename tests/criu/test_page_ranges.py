"""Sets of pages, and the files that say where pages lie."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycriu.images import pb

from snapshotd.criu import page_ranges, pagemap_image
from snapshotd.criu.page_ranges import Range
from snapshotd.criu.pagemap_image import PAGE_BYTES, Pagemap

PAGES = st.sets(st.integers(1, 40))


def ranges(pages: set[int]) -> list[Range]:
    return page_ranges.joined((page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in pages)


def pages(of: list[Range]) -> set[int]:
    return {at // PAGE_BYTES for start, end in of for at in range(start, end, PAGE_BYTES)}


@given(PAGES, PAGES)
def test_ranges_are_sets_of_pages(left: set[int], right: set[int]) -> None:
    assert pages(ranges(left)) == left
    assert page_ranges.common(ranges(left), ranges(right)) == ranges(left & right)
    assert page_ranges.without(ranges(left), ranges(right)) == ranges(left - right)
    assert page_ranges.joined([*ranges(left), *ranges(right)]) == ranges(left | right)
    assert page_ranges.size_bytes(ranges(left)) == len(left) * PAGE_BYTES


@given(PAGES, st.integers(0, 8))
def test_short_gaps_are_bridged(found: set[int], gap: int) -> None:
    bridged = page_ranges.bridged(ranges(found), gap * PAGE_BYTES)
    assert page_ranges.without(ranges(found), bridged) == []
    assert all(later[0] - sooner[1] > gap * PAGE_BYTES for sooner, later in itertools.pairwise(bridged))
    added = page_ranges.without(bridged, ranges(found))
    assert all(end - start <= gap * PAGE_BYTES for start, end in added)


@given(PAGES, PAGES)
def test_pagemap_is_read_as_it_was_written(present: set[int], below: set[int]) -> None:
    pagemap = Pagemap(3, ranges(present), ranges(below - present))
    assert pagemap_image.decode(pagemap_image.encode(pagemap)) == pagemap
    assert pagemap.has() == ranges(present | below)


@pytest.mark.parametrize(
    ("present", "below"),
    [
        ([(4096, 12288)], [(8192, 12288)]),  # both here and below
        ([(4096, 4096)], []),
        ([(4097, 8193)], []),
        ([(4096, 1 << 60)], []),
    ],
)
def test_pagemap_that_criu_would_not_write_is_refused(present: list[Range], below: list[Range]) -> None:
    with pytest.raises(ValueError, match=r"not in order|impossible"):
        pagemap_image.decode(pagemap_image.encode(Pagemap(1, present, below)))


def of_entries(*entries: Any) -> bytes:
    """A pagemap with these entries, whatever they say."""
    messages = (entry.SerializeToString() for entry in entries)
    return pagemap_image.encode(Pagemap(1, [], [])) + b"".join(struct.pack("<I", len(one)) + one for one in messages)


def entry(vaddr: int, compat_nr_pages: int = 0, **more: int) -> Any:
    return pb.pagemap_entry(vaddr=vaddr, compat_nr_pages=compat_nr_pages, **more)


def test_every_form_of_an_entry_that_criu_writes_is_read() -> None:
    content = of_entries(
        entry(0x1000, 2),  # of an old criu: without flags
        entry(0x4000, nr_pages=1, flags=pagemap_image.PRESENT | pagemap_image.LAZY),
        entry(0x5000, nr_pages=1, flags=pagemap_image.PRESENT),
        entry(0x7000, 1, in_parent=True),
        entry(0x8000, nr_pages=3, flags=pagemap_image.IN_PARENT),
        entry(0xC000, nr_pages=1, flags=pagemap_image.PRESENT, in_parent=True),
    )
    found = pagemap_image.decode(content)
    assert found == Pagemap(1, [(0x1000, 0x3000), (0x4000, 0x6000)], [(0x7000, 0xB000), (0xC000, 0xD000)])


@pytest.mark.parametrize(
    "wrong",
    [
        entry(0x1000, 5, nr_pages=0, flags=pagemap_image.PRESENT),
        entry(0x1000, nr_pages=1, flags=0),
        entry(0x1000, nr_pages=1, flags=pagemap_image.LAZY),
        entry(0x1000, nr_pages=1, flags=pagemap_image.PRESENT | pagemap_image.IN_PARENT),
        entry(0x1000, nr_pages=1, flags=pagemap_image.PRESENT | 8),
        entry(0x1000, nr_pages=1 << 60, flags=pagemap_image.PRESENT),
    ],
)
def test_entry_that_criu_would_not_write_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"impossible|has the flags"):
        pagemap_image.decode(of_entries(wrong))


@pytest.mark.parametrize("cut", [3, 9, 20])
def test_pagemap_that_ends_early_is_refused(cut: int) -> None:
    content = pagemap_image.encode(Pagemap(1, [(4096, 8192)], []))
    with pytest.raises(ValueError, match=r"begin like|cannot be parsed|ends early"):
        pagemap_image.decode(content[:cut])
