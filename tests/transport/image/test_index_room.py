"""The memory of an index of blocks is reserved like that of images: without room for it, a copy is sent whole."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.proc.room import RESERVE_BYTES, Room
from snapshotd.transport.image.block_index import BlockIndex, most_bytes
from snapshotd.transport.image.blocks import Offer
from snapshotd.transport.image.frame import PAGE_BYTES, Frame, raw_frame
from snapshotd.transport.image.known_blocks import KnownBlocks

PAGES = 5000
DATA = os.urandom(PAGES * PAGE_BYTES)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(DATA)
    (folder / ".sealed").write_text("[]")
    return folder


class Machine:
    """A daemon's room, and that of another daemon on the machine. `left_bytes`: what both have together."""

    def __init__(self, folder: Path) -> None:
        self.own, self.other = Room(folder, "a"), Room(folder, "b")
        self.left_bytes = 1 << 40
        for room in (self.own, self.other):
            room._own.tightest = lambda: ("this node", self.left_bytes)  # type: ignore[method-assign]

    @property
    def reserved_bytes(self) -> int:
        """As the other daemon sees it."""
        return self.left_bytes - self.other.free().bytes


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "room")
    yield made
    made.own.close()
    made.other.close()


def knows(machine: Machine, image: Path) -> KnownBlocks:
    known = KnownBlocks(machine.own)
    known.images_for = lambda _move: ("job", [image])
    return known


def found(known: KnownBlocks, move: str) -> bool:
    chunk = raw_frame(1, "pages-1.img", 0, DATA[: 8 * PAGE_BYTES])
    return isinstance(known.put_together(move, Offer(chunk).message()), Frame)


def test_index_takes_no_more_memory_than_was_estimated(image: Path) -> None:
    path = image / "pages-1.img"
    tracemalloc.start()
    try:
        index, (before, _) = BlockIndex(), tracemalloc.get_traced_memory()
        index.add(path)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(index) == PAGES
    constant_bytes = 3 << 20  # what is read at a time, and the first table
    assert index.memory_bytes <= most_bytes(path)
    assert peak <= most_bytes(path) + constant_bytes


def test_memory_of_an_index_is_reserved_while_it_is_built(
    image: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, seen = knows(machine, image), []
    add = BlockIndex.add

    def looked(index: BlockIndex, path: Path) -> None:
        seen.append(machine.reserved_bytes)
        add(index, path)
        machine.own.state()
        seen.append(machine.reserved_bytes)

    monkeypatch.setattr(BlockIndex, "add", looked)
    assert found(known, "m-1")
    most = most_bytes(image / "pages-1.img")
    assert seen[0] == most
    assert seen[1] < most // 2, "what the index has by now is not free any more, and so not reserved either"
    machine.own.state()
    assert machine.reserved_bytes == 0
    known.forget("m-1")
    assert machine.own._reserved == {}


def test_image_without_room_for_its_index_is_not_searched_until_there_is(image: Path, machine: Machine) -> None:
    known = knows(machine, image)
    machine.left_bytes = RESERVE_BYTES + most_bytes(image / "pages-1.img") - 1
    assert not found(known, "m-1"), "its content is asked for"
    assert machine.reserved_bytes == 0
    machine.left_bytes += 1
    assert not found(known, "m-1"), "it is decided once for each copy"
    assert found(known, "m-2")
    for move in ("m-1", "m-2"):
        known.forget(move)
    assert known._shared == {}


def test_room_that_another_daemon_has_reserved_is_not_used(image: Path, machine: Machine) -> None:
    known = knows(machine, image)
    machine.left_bytes = RESERVE_BYTES + most_bytes(image / "pages-1.img")
    with machine.other.turn():
        machine.other.count("images", lambda: 1)
    assert not found(known, "m-1")
    machine.other.give_up("images")
    assert found(known, "m-2")
