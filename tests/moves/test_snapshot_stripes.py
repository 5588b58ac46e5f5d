"""The memory of a snapshot, when its image is sent: waited for, and linked instead of sent within one node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, WrongState
from snapshotd.criu import layers, session
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.jobs.pacing import Pacing
from snapshotd.moves.jobs.sending import Sending
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin
from snapshotd.moves.saved import Late, Saved
from snapshotd.transport.image.spill import SpillingStore

IMAGE, TARGET = "m-000000000001", "m-000000000002"
FILES = ["device-7-0", "device-7-1", "pages-1.img", "ahead-pages-12-1.img", "core-12.img"]


class Place:
    """A node with the image of a snapshot."""

    def __init__(self, folder: Path) -> None:
        self.store, self.journal = SpillingStore(folder / "images"), Journal(folder / "state")
        config = SimpleNamespace(node="a")
        node = SimpleNamespace(
            config=config, journal=self.journal, store=self.store, store_of=lambda _begin: self.store, saving={}
        )
        self.node = cast(Any, node)
        self.log = self.begin(IMAGE, "source", "snapshot")
        self.files = [self.store.path(IMAGE) / name for name in FILES]
        for path in self.files:
            path.write_bytes(path.name.encode())

    def begin(self, move: str, role: str, kind: str) -> MoveLog:
        self.store.create(move, 1)
        where = ("train-0-01234567", "train", 0, "a", "a:1", "a", "a:1")
        return self.journal.begin(Begin(move, role, *where, "00" * 32, "boot", 1.0, coordinator="m-c", kind=kind))

    def left_to_send(self) -> list[str]:
        request = pb.SendRequest(image=IMAGE, move=TARGET, target_node="a")
        return [path.name for path in Sending(self.node, self.log, request, Pacing())._link(self.files)]

    def images(self) -> StoredImages:
        keepers: Any = None
        return StoredImages(self.node, keepers)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_target_on_the_same_node_gets_links(place: Place) -> None:
    place.begin(TARGET, "target", "")
    for _ in range(2):  # the answer to the first attempt was lost
        assert place.left_to_send() == ["core-12.img"], "the target corrects it"
    linked = [place.store.path(TARGET) / name for name in FILES[:-1]]
    assert [path.stat().st_ino for path in linked] == [path.stat().st_ino for path in place.files[:-1]]
    place.store.drop(TARGET)
    assert [path.read_bytes() for path in place.files] == [name.encode() for name in FILES]


def test_move_that_does_not_come_here_gets_no_links(place: Place) -> None:
    assert place.left_to_send() == FILES
    place.begin(TARGET, "source", "snapshot")
    assert place.left_to_send() == FILES


async def test_image_is_sent_when_its_device_memory_is_saved(place: Place) -> None:
    async def save() -> Saved:
        return Saved(5, 0.5)

    place.node.saving[IMAGE, Late.DEVICE] = asyncio.create_task(save())
    (part,) = await place.images()._saved(IMAGE)
    assert (part.name, part.bytes, part.seconds) == ("save", 5, 0.5)
    assert await place.images()._saved(IMAGE) == []


async def test_memory_that_is_saved_is_reported_once_although_several_copies_wait_for_it(place: Place) -> None:
    go = asyncio.Event()

    async def save() -> Saved:
        await go.wait()
        return Saved(5, 0.5)

    place.node.saving[IMAGE, Late.DEVICE] = asyncio.create_task(save())
    images = place.images()
    waiting = [asyncio.create_task(images._saved(IMAGE)) for _ in range(2)]
    await asyncio.sleep(0)
    go.set()
    assert sorted(len(parts) for parts in await asyncio.gather(*waiting)) == [0, 1]


async def test_image_whose_device_memory_cannot_be_saved_is_not_sent(place: Place) -> None:
    async def save() -> Saved:
        return Saved(5, 0.5, "the copier was lost")

    place.node.saving[IMAGE, Late.DEVICE] = asyncio.create_task(save())
    with pytest.raises(GpuFailed, match="the copier was lost"):
        await place.images()._saved(IMAGE)


async def test_image_of_a_snapshot_that_is_given_up_is_not_sent(place: Place) -> None:
    place.node.saving[IMAGE, Late.DEVICE] = saving = asyncio.create_task(asyncio.sleep(600))
    sending = asyncio.create_task(place.images()._saved(IMAGE))
    await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(WrongState, match="given up"):
        await sending


def test_room_for_a_rank_whose_pages_were_linked_is_kept_until_it_has_them(place: Place) -> None:
    """What is reserved for its image ends with the seal."""
    place.begin(TARGET, "target", "")
    for path in place.files:
        path.write_bytes(b"p" * 8192)
    request = pb.SendRequest(image=IMAGE, move=TARGET, target_node="a")
    before_bytes = place.store.reserved_bytes()
    sending = Sending(place.node, place.log, request, Pacing())
    sending._link(place.files)
    with sending._room_for_linked():
        assert place.store.reserved_bytes() == before_bytes + 2 * 8192, "its two files of pages"
        assert place.store.seal(TARGET, []) == []
    assert place.store.reserved_bytes() >= 2 * 8192
    place.store.drop(TARGET)
    assert place.store.reserved_bytes() < 2 * 8192


def test_room_is_given_up_if_the_seal_is_refused(place: Place) -> None:
    place.begin(TARGET, "target", "")
    place.files[2].write_bytes(b"p" * 8192)
    request = pb.SendRequest(image=IMAGE, move=TARGET, target_node="a")
    before_bytes = place.store.reserved_bytes()
    sending = Sending(place.node, place.log, request, Pacing())
    sending._link(place.files)
    with pytest.raises(WrongState), sending._room_for_linked():
        raise WrongState("dropped meanwhile")
    assert place.store.reserved_bytes() == before_bytes


def test_file_that_two_images_share_counts_once(place: Place) -> None:
    place.files[2].write_bytes(b"p" * 8192)
    held_bytes = place.store.held_bytes()
    place.begin(TARGET, "target", "")
    assert place.left_to_send() == ["core-12.img"]
    assert place.store.held_bytes() == held_bytes


@pytest.mark.parametrize("outside", [True, False])
def test_pages_are_kept_if_another_image_has_them(tmp_path: Path, outside: bool) -> None:
    """Links inside the folder, of pages that processes share, are no other image."""
    folder, kept = tmp_path / "image", tmp_path / "kept"
    (folder / "parent" / "parent").mkdir(parents=True)
    kept.mkdir()
    (folder / "pages-1.img").write_bytes(b"p")
    for name in ("pages-1.img", "parent/pages-7.img", "parent/parent/pages-9.img"):
        target = folder / name
        if not target.exists():
            target.hardlink_to(folder / "pages-1.img")
    if outside:
        (kept / "pages-1.img").hardlink_to(folder / "pages-1.img")
    shares = layers.is_shared(folder)
    assert shares == outside
    asked = session.restore_request(folder, [], keeps_pages=shares)
    assert asked.opts.auto_dedup != outside
