"""A snapshot whose image is on a disk: all its parts get there, it counts only when the disk has them, and it is not linked
to what is in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreadable
from snapshotd.moves.device import stripe_files
from snapshotd.moves.device.into_image import IntoImage
from snapshotd.moves.device.stripe_room import ON_DISK, StripeRoom
from snapshotd.moves.device.striped import Striped
from snapshotd.moves.jobs import made_image
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.jobs.pacing import Pacing
from snapshotd.moves.jobs.sending import Sending
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.kept_files import KeptFiles
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc import host
from snapshotd.proc.room import Room
from snapshotd.transport.image.spill import SpillDisk, SpillingStore
from snapshotd.transport.image.store import ImageStore
from tests.shim.jobs import until

pytestmark = pytest.mark.root

IMAGE, TARGET, OTHER = "m-000000000001", "m-000000000002", "m-000000000003"
NAMES, SIZES = ["device-7-0", "device-7-1"], [5000, 3]


class Place:
    """A node with a disk, and the image of a snapshot on it."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.folder, self.room = folder, Room(folder / "room", "a")
        self.disk = SpillDisk(disk)
        self.store = SpillingStore(folder / "images", self.disk, room=self.room)
        self.suspended, self.journal = ImageStore(folder / "suspended", on_disk=True), Journal(folder / "state")
        node = SimpleNamespace(
            config=SimpleNamespace(node="a", image_dir=folder / "images"),
            journal=self.journal,
            store=self.store,
            suspended=self.suspended,
            store_of=lambda begin: self.store if begin.kind else self.suspended,
            kept_files=KeptFiles(folder / "files.sock"),
            room=self.room,
            saving={},
        )
        self.node = cast(Any, node)

    def begin(self, move: str, role: str = "source", kind: str = "snapshot", *, spilled: bool = True) -> MoveLog:
        (self.disk if spilled else self.store).create(move, 1 << 20)
        return self.record(move, role, kind)

    def record(self, move: str, role: str = "source", kind: str = "snapshot") -> MoveLog:
        where = ("train-0-01234567", "train", 0, "a", "a:1", "a", "a:1")
        return self.journal.begin(Begin(move, role, *where, "00" * 32, "boot", 1.0, coordinator="m-c", kind=kind))

    def restart(self) -> None:
        """The next daemon, with what the one before has left."""
        self.disk.close()
        self.disk = SpillDisk(self.disk.folder)
        self.store = self.node.store = SpillingStore(self.folder / "images", self.disk, room=self.room)
        self.journal = self.node.journal = Journal(self.folder / "state")

    def images(self) -> StoredImages:
        keepers: Any = None
        return StoredImages(self.node, keepers)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The disk is another file system than the rest, and in memory only for the test."""
    monkeypatch.setattr(host, "is_ram_backed", lambda _path: False)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", disk], check=True)
    place = Place(tmp_path, disk)
    yield place
    place.disk.close()
    place.room.close()
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("spilled", [True, False])
async def test_image_counts_only_when_the_disk_has_it(
    place: Place, spilled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_log = place.begin(IMAGE, spilled=spilled)
    (place.store.path(IMAGE) / "late").write_bytes(b"x" * 5000)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    parts = await place.images()._synced(move_log)
    assert [part.name for part in parts] == (["sync"] if spilled else [])
    assert bool(synced) == spilled
    if spilled:
        assert parts[0].bytes >= 5000


@pytest.mark.parametrize("spilled", [True, False])
async def test_image_that_a_disk_has_changed_is_not_linked(place: Place, spilled: bool) -> None:
    """It is compared with what was signed when it was made. What lies in memory is not."""
    move_log = place.begin(IMAGE, spilled=spilled)
    path = place.store.path(IMAGE) / NAMES[0]
    path.write_bytes(b"x" * 5000)
    made = pb.MadeImage(node="a", files=await made_image.contents([path], 1))
    sending = Sending(place.node, move_log, pb.SendRequest(target_node="a"), Pacing())
    await sending._must_be_whole(made, [path])
    path.write_bytes(b"x" * 4999 + b"y")
    if spilled:
        with pytest.raises(Unreadable, match=f"not what a has made: {path.name}"):
            await sending._must_be_whole(made, [path])
    else:
        await sending._must_be_whole(made, [path])


@pytest.mark.parametrize("target_spilled", [True, False])
def test_image_on_the_disk_is_not_linked_to_memory(place: Place, target_spilled: bool) -> None:
    move_log = place.begin(IMAGE)
    place.begin(TARGET, "target", "", spilled=target_spilled)
    files = [place.store.path(IMAGE) / name for name in [*NAMES, "pages-1.img", "core-12.img"]]
    for path in files:
        path.write_bytes(path.name.encode())
    request = pb.SendRequest(image=IMAGE, move=TARGET, target_node="a")
    left = Sending(place.node, move_log, request, Pacing())._link(files)
    assert left == (files[-1:] if target_spilled else files)


@pytest.mark.parametrize("beside_image", [True, False])
async def test_device_memory_gets_to_its_image_on_the_disk(place: Place, beside_image: bool) -> None:
    """Also if it was in memory, because a process of the rank has written it."""
    place.store.create_kept(OTHER, 1)
    move_log = place.begin(IMAGE)
    memory_bytes, disk_bytes = place.store.room_bytes(), place.store.disk_room_bytes()
    room = StripeRoom(place.node, IMAGE, len(NAMES))
    room.place(beside_image=beside_image)
    assert (room.folder == place.store.path(IMAGE) / ON_DISK) == beside_image
    room.make_folder()
    if beside_image:
        await room.make_files(list(zip(NAMES, SIZES, strict=True)))
        assert place.store.disk_room_bytes() == pytest.approx(disk_bytes, abs=1 << 16), "it was reserved with the image"
    for name, size in zip(NAMES, SIZES, strict=True):
        room.path(name).write_bytes(name.encode()[:1] * size)
    into = IntoImage(place.node, move_log, room)
    memory: Any = None
    into._striped = [Striped(memory, 7, NAMES, sum(SIZES), sizes=SIZES)]
    into._move_files()
    image = place.store.path(IMAGE)
    assert {path.name: path.stat().st_size for path in image.iterdir()} == dict(zip(NAMES, SIZES, strict=True))
    assert {path.stat().st_mode & 0o777 for path in image.iterdir()} == {0o600}
    assert not (place.folder / "images" / "parked").exists()
    assert place.store.room_bytes() == pytest.approx(memory_bytes, rel=0.2), "nothing is left in memory"


@pytest.mark.parametrize("striped", [[7], []])
async def test_files_of_processes_that_are_left_to_the_checkpoint_are_removed(place: Place, striped: list[int]) -> None:
    move_log = place.begin(IMAGE)
    names = {pid: f"device-{pid}-0" for pid in (7, 8)}
    room = StripeRoom(place.node, IMAGE, len(names))
    room.place(beside_image=True)
    room.make_folder()
    await room.make_files([(name, 3) for name in names.values()])
    for pid in names.keys() - striped:
        stripe_files.empty(room.path(names[pid]))
    into = IntoImage(place.node, move_log, room)
    memory: Any = None
    into._striped = [Striped(memory, pid, [names[pid]], 3, sizes=[3]) for pid in striped]
    into._move_files()
    assert [path.name for path in place.store.path(IMAGE).iterdir()] == [names[pid] for pid in striped]


async def test_files_that_were_begun_on_the_disk_in_vain_are_removed(place: Place) -> None:
    place.begin(IMAGE)
    room = StripeRoom(place.node, IMAGE, len(NAMES))
    room.place(beside_image=True)
    room.make_folder()
    await room.make_files(list(zip(NAMES, SIZES, strict=True)))
    room.place(beside_image=False)
    assert list(place.store.path(IMAGE).iterdir()) == []
    assert room.folder == place.folder / "images" / "parked" / IMAGE
    room.place(beside_image=True)
    assert room.folder == place.store.path(IMAGE) / ON_DISK


def test_next_daemon_keeps_what_is_needed_and_removes_the_rest(place: Place) -> None:
    """What has no record is of a daemon that was killed before it could write one."""
    kept, undone = place.begin(IMAGE), place.begin(OTHER)
    place.disk.create(TARGET, 1)
    for move_log, outcome in ((kept, Outcome.COMMIT), (undone, Outcome.ABORT)):
        move_log.mark(Mark.STREAMED)
        move_log.decide(outcome, "", "coordinator")
        move_log.mark(Mark.SETTLED)
    place.images().adopt()
    assert place.store.moves() == {IMAGE}
    until(lambda: {path.name for path in (place.folder / "disk").iterdir()} == {".boot", IMAGE})


@pytest.mark.parametrize(("outcome", "mark"), [(Outcome.ABORT, Mark.DISCARDED), (Outcome.COMMIT, Mark.ACTIVATED)])
@pytest.mark.parametrize("spilled", [True, False])
def test_next_daemon_removes_what_ended_rollbacks_have_left(
    place: Place, outcome: Outcome, mark: Mark, spilled: bool
) -> None:
    """Their daemon was killed while it removed the image, after it had journalled the end."""
    ended, open_ = place.begin(IMAGE, "target", "", spilled=spilled), place.begin(OTHER, "target", "", spilled=spilled)
    folders = [place.store.path(move) for move in (IMAGE, OTHER)]
    for folder in folders:
        (folder / "pages-1.img").write_bytes(b"x" * 5000)
    for move_log in (ended, open_):
        move_log.mark(Mark.PREPARED)
    ended.decide(outcome, "", "coordinator")
    ended.mark(mark)
    place.restart()
    assert place.store.moves() == {IMAGE, OTHER}
    place.images().adopt()
    assert place.store.moves() == {OTHER}
    until(lambda: [folder.exists() for folder in folders] == [False, True])
