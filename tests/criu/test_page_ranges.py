"""Sets of pages, and the files that say where pages lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("cut", [3, 9, 20])
def test_pagemap_that_ends_early_is_refused(cut: int) -> None:
    content = pagemap_image.encode(Pagemap(1, [(4096, 8192)], []))
    with pytest.raises(ValueError, match=r"begin like|cannot be parsed|ends early"):
        pagemap_image.decode(content[:cut])
