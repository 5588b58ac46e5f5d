"""Tests which keeper may register or claim which rank. The kernel's view of the processes is in tests/keeper."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shim.keeper.frames import decode, encode
from snapshotd.api.errors import Denied, NotFound
from snapshotd.keepers import adoption
from snapshotd.keepers.adoption import Adoption
from snapshotd.keepers.hello import Hello, parse_hello
from snapshotd.keepers.listener import NotWanted
from snapshotd.keepers.listing import ranks_of
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.departure import Departure
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process

ALICE, BOB = 1500, 1501
KEEPER, RANK = Process(100, 1), Process(101, 2)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def group_of(_pid: int, uid: str) -> Cgroup:
        folder = tmp_path / uid
        folder.mkdir()
        return Cgroup(folder)

    monkeypatch.setattr(adoption, "cgroup_for_home", group_of)
    config = SimpleNamespace(node="node-1", advertise="node-1:7070", ranks_per_user=3, nodes=None)
    return SimpleNamespace(ranks=Ranks(tmp_path / "state"), config=config, journal=Journal(tmp_path / "state"))


@pytest.fixture
def adopts(node: Any) -> Adoption:
    none: Any = None
    return Adoption(node, none, none, none, none)


def hello(user_id: int = ALICE, **fields: Any) -> Hello:
    known = {"role": "home", "job": "train", "rank": 0, "relay_key": "0" * 32, "pid": 101}
    return parse_hello(decode(encode("hello", known | fields)), user_id)


async def test_keeper_that_missed_the_answer_gets_the_same_rank_again(node: Any, adopts: Adoption) -> None:
    first = await adopts.adopt(hello(), KEEPER, RANK)
    assert await adopts.adopt(hello(), KEEPER, RANK) == first
    assert len(node.ranks.all()) == 1


async def test_keeper_can_register_one_rank_only(node: Any, adopts: Adoption) -> None:
    """Otherwise one process could fill the registry, which is on the disk of the journal."""
    await adopts.adopt(hello(), KEEPER, RANK)
    for other in (hello(relay_key="1" * 32), hello(rank=1, relay_key="1" * 32)):
        with pytest.raises(Denied, match="this keeper is that of rank"):
            await adopts.adopt(other, KEEPER, RANK)
    with pytest.raises(Denied, match="this keeper is that of rank"):
        await adopts.adopt(hello(), KEEPER, Process(102, 3))
    assert len(node.ranks.all()) == 1


async def test_number_of_ranks_of_a_user_is_limited(node: Any, adopts: Adoption) -> None:
    for number in range(3):
        await adopts.adopt(hello(), Process(100, number), Process(101, number))
    with pytest.raises(Denied, match="has 3 ranks on this node"):
        await adopts.adopt(hello(), Process(100, 3), Process(101, 3))
    await adopts.adopt(hello(BOB), Process(100, 4), Process(101, 4))
    for number in range(5, 10):
        await adopts.adopt(hello(0), Process(100, number), Process(101, number))
    assert len(node.ranks.all()) == 9


async def test_second_job_that_is_named_after_the_same_script_gets_a_number(node: Any, adopts: Adoption) -> None:
    def start(number: int, **fields: Any) -> Any:
        return adopts.adopt(hello(**({"alone": True} | fields)), Process(100, number), Process(101, number))

    for number in range(3):
        await start(number)
    assert [entry.job for entry in node.ranks.all()] == ["train", "train-2", "train-3"]
    node.ranks.remove(node.ranks.all()[1])
    await start(3)
    assert sorted(entry.job for entry in node.ranks.all()) == ["train", "train-2", "train-3"]
    assert node.ranks.all()[1].uid.startswith("train-2-0-")
    await start(4, user_id=BOB)  # a job belongs to its user
    assert [entry.job for entry in node.ranks.all() if entry.user_id == BOB] == ["train"]
    await start(5, user_id=BOB, alone=False)  # a person or a launcher has named it
    assert [entry.job for entry in node.ranks.all() if entry.user_id == BOB] == ["train", "train"]


async def test_long_name_of_a_job_has_room_for_its_number(node: Any, adopts: Adoption) -> None:
    for number in range(2):
        await adopts.adopt(hello(job="x" * 60, alone=True), Process(100, number), Process(101, number))
    assert sorted(len(entry.job) for entry in node.ranks.all()) == [55, 60]


async def test_another_process_cannot_replace_the_rank(node: Any, adopts: Adoption) -> None:
    welcome = await adopts.adopt(hello(), KEEPER, RANK)
    with pytest.raises(Denied, match="is process 101, not 102"):
        await adopts.adopt(hello(uid=welcome.uid, pid=102), KEEPER, Process(102, 3))
    with pytest.raises(Denied, match="has another keeper"):
        await adopts.adopt(hello(uid=welcome.uid), Process(103, 4), RANK)
    assert node.ranks.all()[0].process == RANK


MOVE, EARLIER = "m-0123456789ab", "m-0123456789aa"


def guest_entry(restored_by: str = "") -> RankEntry:
    return RankEntry(
        uid="train-0-0a0b0c0d",
        job="train",
        rank=0,
        role="guest",
        keeper_pid=0,
        keeper_start_ticks=0,
        cgroup="/nowhere",
        home_node="node-2",
        home_endpoint="node-2:7070",
        relay_key="0" * 32,
        boot_id="boot",
        user_id=ALICE,
        process_user_id=ALICE,
        restored_by=restored_by,
    )


async def test_guest_keeper_connects_first_as_root_and_later_as_the_ranks_user(node: Any, adopts: Adoption) -> None:
    guest = guest_entry()
    node.ranks.put(guest)

    def claim(user_id: int) -> Hello:
        return hello(user_id, role="guest", uid=guest.uid, pid=0)

    with pytest.raises(Denied, match="may not run a guest keeper"):
        await adopts.adopt(claim(ALICE), KEEPER, None)  # alice knows the relay key, from her home keeper
    await adopts.adopt(claim(0), KEEPER, None)
    await adopts.adopt(claim(ALICE), KEEPER, None)
    for user_id, keeper in ((ALICE, Process(104, 5)), (0, Process(104, 5)), (BOB, KEEPER)):
        with pytest.raises(Denied):
            await adopts.adopt(claim(user_id), keeper, None)
    with pytest.raises(NotFound):
        await adopts.adopt(hello(0, role="guest", uid=guest.uid, relay_key="1" * 32), KEEPER, None)


def guest_hello(move: str) -> Hello:
    return hello(0, role="guest", uid="train-0-0a0b0c0d", pid=0, move=move)


async def test_keeper_of_an_earlier_move_of_the_rank_is_not_adopted(node: Any, adopts: Adoption) -> None:
    """Its daemon was killed before it knew the keeper's pid. Uid and key are those of the rank, and so are the same."""
    node.ranks.put(guest_entry(MOVE))
    with pytest.raises(NotWanted):
        await adopts.adopt(guest_hello(EARLIER), Process(104, 5), None)
    assert node.ranks.all()[0].keeper_pid == 0
    await adopts.adopt(guest_hello(MOVE), KEEPER, None)
    assert node.ranks.all()[0].keeper == KEEPER


@pytest.mark.parametrize(
    ("mark", "wanted"),
    [
        (None, False),
        (Mark.PREPARED, False),
        (Mark.RESTORING, False),
        (Mark.DISCARDED, False),
        (Mark.HELD, True),
        (Mark.ACTIVATED, True),
    ],
)
async def test_unknown_guest_keeper_may_end_only_if_its_move_has_no_copy(
    node: Any, adopts: Adoption, mark: Mark | None, wanted: bool
) -> None:
    if mark is not None:
        node.journal.begin(
            Begin(MOVE, "target", "job-0-x", "job", 0, "n-1", "a:1", "n-2", "b:1", "ab" * 32, "boot", 1.0, 30.0)
        ).mark(mark)
    with pytest.raises(NotFound) as refused:
        await adopts.adopt(guest_hello(MOVE), KEEPER, None)
    assert isinstance(refused.value, NotWanted) is not wanted


async def test_rank_that_ends_while_its_move_is_undone_is_not_registered_again(node: Any, adopts: Adoption) -> None:
    """The undo replaces the key of the relay in the entry, which the end of the rank may just have removed."""
    await adopts.adopt(hello(), KEEPER, RANK)
    (entry,) = node.ranks.all()
    departure: Any = SimpleNamespace(node=node)
    await Departure._replace_relay_key(departure, entry)
    assert [entry.uid] == [known.uid for known in Ranks(node.ranks.folder.parent).all()], "it is still there"
    node.ranks.remove(entry)
    await Departure._replace_relay_key(departure, entry)
    assert node.ranks.all() == []
    assert list(node.ranks.folder.glob("*.json")) == []


async def test_end_of_a_protected_copy_whose_keeper_died_is_held_back_and_it_is_not_listed(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may be rolled back. Meanwhile another copy of the rank may run: this one must not be taken for it."""
    reported: list[str] = []

    async def report_end(entry: RankEntry, status: int) -> None:
        reported.append(entry.uid)

    relays: Any = SimpleNamespace(report_end=report_end)
    none: Any = SimpleNamespace(moves={}, withdraw=lambda entry: None)
    adopts = Adoption(node, none, none, relays, none)

    async def kill(_entry: RankEntry) -> None:
        pass

    monkeypatch.setattr(adoption, "_kill", kill)
    guest = RankEntry("train-1", "train", 1, "guest", 1, 1, "none", "b", "b:1", "key", "an earlier boot", ALICE)
    guest.tethered, guest.coordinator_node = True, "node-1"
    node.ranks.put(guest)
    await adopts.lost(guest)
    assert (reported, await ranks_of(node, brief=True)) == ([], [])
    assert Ranks(node.ranks.folder.parent).get("train-1", "guest") is not None, "a restarted daemon reports it"
    (waiting,) = adopts._reports
    waiting.cancel()
    await adopts.lost(guest)  # when the time for a rollback is over
    async with asyncio.timeout(60):
        await asyncio.gather(*adopts._reports, return_exceptions=True)
    assert reported == ["train-1"]
    assert node.ranks.all() == []
