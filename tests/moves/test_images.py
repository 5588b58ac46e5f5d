"""The images of suspended ranks on a node: listed, kept and dropped, also if some are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Denied, NotFound, WrongState
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import description
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.home_keepers import HomeKeepers
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.kept_files import KeptFiles
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc import host
from snapshotd.transport.image.store import ImageStore
from tests.moves.test_home_keepers import META, until_told

FIRST, SECOND = "m-000000000001", "m-000000000002"


class Store:
    """A node with the images of suspended ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder, Journal(folder)
        self.told: list[str] = []  # ranks whose home keepers were told that they were given up

    def suspend(self, move: str, *, released: bool = True) -> MoveLog:
        nodes = ("node-1", "e", "node-1", "e")
        begin = Begin(
            move, "source", f"night-{move[-1]}", "night", int(move[-1]), *nodes, "00" * 32, "boot", 1.0, 30.0, 7
        )
        move_log = self.journal.begin(_with_coordinator(begin))
        images = self.folder / "suspended" / move
        images.mkdir(parents=True)
        (images / "core.img").write_bytes(b"x" * 5000)
        (images / ".sealed").write_text("[]")
        (images / description.FILE).write_text(json.dumps(META))
        rank = pb.Rank(uid=begin.rank_uid, job="night", rank=begin.rank, home_node="node-2", user_id=7)
        stored.describe(images, move_log, pb.RankFacts(rank=rank))
        move_log.mark(Mark.STREAMED)
        if released:
            move_log.decide(Outcome.COMMIT, "every rank is ready", "coordinator")
            move_log.mark(Mark.SETTLED)
        return move_log

    def images(self) -> StoredImages:
        """As a daemon that has just started knows them."""
        suspended = ImageStore(self.folder / "suspended", on_disk=True)
        config = SimpleNamespace(node="node-1", advertise="e")
        store = ImageStore(self.folder / "snapshots")
        node: Any = SimpleNamespace(journal=self.journal, suspended=suspended, store=store, config=config)
        node.kept_files = KeptFiles(self.folder / "files.sock")
        node.store_of = lambda begin: store if begin.kind else suspended
        return StoredImages(node, HomeKeepers(self.journal, self._tell))

    async def _tell(self, entry: RankEntry, status: int) -> None:
        self.told.append(entry.uid)

    def left(self) -> set[str]:
        return {path.name for path in (self.folder / "suspended").iterdir()}


def _with_coordinator(begin: Begin) -> Begin:
    fields = {name: getattr(begin, name) for name in begin.__struct_fields__}
    return Begin(**{**fields, "coordinator": "m-0000000000ff", "coordinator_node": "node-1"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


async def test_suspended_ranks_are_listed_with_the_size_of_their_images(store: Store) -> None:
    store.suspend(FIRST)
    store.suspend(SECOND, released=False)
    (rank,) = await store.images().ranks()
    assert (rank.uid, rank.home_node, rank.place, rank.at_node) == ("night-1", "node-2", pb.Rank.SUSPENDED, "node-1")
    assert rank.memory_bytes >= 5000


@pytest.mark.parametrize("damage", ["garbage", "missing", "no image"])
async def test_damaged_image_does_not_hide_the_other_ranks(store: Store, damage: str) -> None:
    facts = store.suspend(FIRST).folder / stored.FACTS
    store.suspend(SECOND)
    images = store.images()
    match damage:
        case "garbage":
            facts.write_bytes(b"\xff\xff\xff garbage")
        case "missing":
            facts.unlink()
        case _:
            shutil.rmtree(store.folder / "suspended" / FIRST)
    ranks = await images.ranks()
    assert [(rank.uid, rank.job, rank.rank, rank.user_id) for rank in ranks] == [
        ("night-1", "night", 1, 7),
        ("night-2", "night", 2, 7),
    ]
    assert all(rank.place == pb.Rank.SUSPENDED for rank in ranks)
    if damage != "no image":
        with pytest.raises(Damaged):
            await images.describe(FIRST)


async def test_images_that_are_needed_or_unknown_stay_at_start(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.suspend(FIRST)
    unknown, unfinished = "m-00000000000a", "m-00000000000b"
    for move in (unknown, unfinished):
        (store.folder / "suspended" / move).mkdir()
    (store.folder / "suspended" / unknown / ".sealed").write_text("[]")
    store.images().adopt()
    assert store.left() == {FIRST, unknown}, "a partial image of which nothing is known is of no use"
    assert unknown in caplog.text


async def test_image_is_dropped_for_its_coordinator_and_for_operators_only(store: Store) -> None:
    store.suspend(FIRST)
    store.suspend(SECOND, released=False)
    images = store.images()
    with pytest.raises(Denied):
        await images.drop(FIRST, "resumed", "node-2")
    with pytest.raises(WrongState):
        await images.drop(SECOND, "resumed", "node-1")
    await images.drop(FIRST, "resumed", "node-1")
    await images.drop(FIRST, "again", "node-1")
    assert store.left() == {SECOND}
    with pytest.raises(NotFound):
        await images.describe(FIRST)


async def test_damaged_image_can_be_dropped(store: Store) -> None:
    """The drop of its job would never end otherwise."""
    store.suspend(FIRST)
    (store.folder / "suspended" / FIRST / ".sealed").unlink()
    await store.images().drop(FIRST, "given up", "")
    assert store.left() == set()


@pytest.mark.parametrize("given_up", [True, False])
async def test_home_keeper_is_told_only_if_the_job_was_given_up(store: Store, given_up: bool) -> None:
    move_log = store.suspend(FIRST)
    images = store.images()
    await images.drop(FIRST, "why", "node-1", given_up=given_up)
    await until_told(move_log)
    assert store.told == (["night-1"] if given_up else [])
    assert store.left() == set()
    await images.home_keepers.stop()


async def test_image_survives_a_reboot(store: Store) -> None:
    """A daemon after the reboot reads journal and image from the disk: the rank is listed, described, and what was stored."""
    assert store.suspend(FIRST).begin.boot_id != host.boot_id()
    store.journal = Journal(store.folder)
    images = store.images()
    images.adopt()
    assert [rank.uid for rank in await images.ranks()] == ["night-1"]
    assert (await images.describe(FIRST)).facts.rank.home_node == "node-2"
    files = stored.verified(store.folder / "suspended" / FIRST, store.journal.get(FIRST))
    assert [path.name for path in files] == ["core.img", description.FILE]
