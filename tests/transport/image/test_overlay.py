"""Files that are sent in rounds: the last content of each page counts, its memory once, and all rounds or none."""

from __future__ import annotations

import pytest

from snapshotd.api.snapshotd_pb2 import ImageFile
from snapshotd.transport.image.chunk_list import Chunks, summary
from snapshotd.transport.image.frame import PAGE_BYTES, Frame, Kind, data_frame, hole_frame, parse_header
from snapshotd.transport.image.overlay import file_of, round_name
from snapshotd.transport.image.store import ImageStore

MOVE = "m-0123456789ab"
FILE = "ahead-pages-7-1.img"
PAGES = 16


def pages(number: int, content: dict[int, bytes]) -> list[Frame]:
    """A round with these pages, as the source sends it: one chunk, and a hole behind it."""
    bitmap = sum(1 << page for page in content).to_bytes(2, "little")
    payload = b"".join(content[page] * PAGE_BYTES for page in sorted(content))
    name = round_name(FILE, number)
    frame = Frame(Kind.DATA, number, name, 0, PAGES * PAGE_BYTES, bitmap, len(payload), payload=payload)
    frame.digest = frame.computed_digest()
    parsed = parse_header(frame.header())  # as it arrives
    parsed.payload = payload
    return [parsed, hole_frame(number + 100, name, PAGES * PAGE_BYTES, 8 * PAGE_BYTES)]


def listed(frames: list[Frame]) -> list[ImageFile]:
    files: dict[str, Chunks] = {}
    for frame in frames:
        files.setdefault(frame.name, {})[frame.offset] = (frame.length, frame.digest)
    return [summary(name, chunks) for name, chunks in files.items()]


def test_the_last_content_of_each_page_counts(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    frames = [*pages(1, {0: b"a", 1: b"b", 15: b"c"}), *pages(2, {1: b"d", 2: b"e"}), *pages(3, {2: b"f"})]
    for frame in frames:
        assert store.write(MOVE, frame)
    assert store.seal(MOVE, listed(frames)) == []
    folder = store.path(MOVE)
    assert [path.name for path in folder.iterdir() if path.name != ".sealed"] == [FILE]
    content = (folder / FILE).read_bytes()
    assert len(content) == (PAGES + 8) * PAGE_BYTES
    found = {at // PAGE_BYTES: content[at : at + 1] for at in range(0, len(content), PAGE_BYTES)}
    assert {page: byte for page, byte in found.items() if byte != b"\0"} == {0: b"a", 1: b"d", 2: b"f", 15: b"c"}


def test_a_page_that_is_replaced_is_reserved_once(store: ImageStore) -> None:
    store.create(MOVE, 64 * PAGE_BYTES)
    for number in range(1, 10):
        for frame in pages(number, dict.fromkeys(range(10), b"x")):
            assert store.write(MOVE, frame)
    assert store.reserved_bytes() == 54 * PAGE_BYTES


def test_rounds_of_a_file_that_is_not_listed_are_dropped(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    image = data_frame(50, "core-1.img", 0, b"x")
    for frame in [*pages(1, {0: b"a"}), *pages(2, {0: b"b"}), image]:
        assert store.write(MOVE, frame)
    assert store.seal(MOVE, listed([image])) == []
    assert not (store.path(MOVE) / FILE).exists()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_file_of_which_a_round_is_not_listed_is_damaged(store: ImageStore, kept: int) -> None:
    store.create(MOVE, 1 << 20)
    frames = [*pages(1, {0: b"a"}), *pages(2, {0: b"b"})]
    for frame in frames:
        assert store.write(MOVE, frame)
    some = [frame for frame in frames if frame.name == round_name(FILE, kept)]
    assert store.seal(MOVE, listed(some)) == [round_name(FILE, 3 - kept)]


def test_a_round_whose_chunk_is_missing_is_damaged(store: ImageStore) -> None:
    store.create(MOVE, 1 << 20)
    frames = pages(1, {0: b"a"})
    assert store.write(MOVE, frames[1])
    assert store.seal(MOVE, listed(frames)) == [round_name(FILE, 1)]


@pytest.mark.parametrize("name", ["ahead-pages-7-2.img.1", "ahead-0123456789abcdef", "pages-1.img", f"{FILE}.x", FILE])
def test_other_names_are_their_own_files(name: str) -> None:
    assert file_of(name) == name
