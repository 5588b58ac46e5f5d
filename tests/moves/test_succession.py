"""Another coordinator is obeyed only if the former one has handed the job over, or is silent and declared dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.image_copies import copies_of, nodes_of
from migrator.job_results import JobOptions
from migrator.jobs import succession as taking_over
from migrator.jobs.succession import newest_whole, participants
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Refused, Unreachable, WrongState
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.jobs import records, succession
from snapshotd.moves.jobs.succession import Succession
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc import host
from tests.moves.test_coordinator import FIRST
from tests.moves.test_rollback_records import Protected

UID, IMAGE = "train-0", "m-000000000a01"


class Place(Protected):
    """A node with a rank and an image that are bound to the coordinator node-9, which answers what the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.former: pb.Outcome | None = None  # None: it is silent
        self.machine = False
        self.cut_off: list[tuple[str, str]] = []
        self.registry = Ranks(folder)
        cgroup = str(folder / "none")
        self.entry = RankEntry(UID, "train", 0, "home", 1, 1, cgroup, "node-1", "e", "key", host.boot_id(), 7)
        self.entry.coordinator_node, self.entry.tethered = "node-9", True
        self.registry.put(self.entry)
        names = (IMAGE, "source", UID, "train", 0, "node-1", "e", "node-1", "e", "00" * 32, host.boot_id(), 1.0)
        bound = Begin(*names, coordinator=FIRST, coordinator_node="node-9", coordinator_endpoint="e9", kind="snapshot")
        self.image = self.journal.begin(bound)
        self.image.mark(Mark.STREAMED, continued=True)
        self.image.decide(Outcome.COMMIT, "kept", "coordinator")
        self.image.mark(Mark.SETTLED)
        node: Any = self.steps.node
        node.ranks = self.registry
        nothing: Any = SimpleNamespace(moves={})
        endings: Any = SimpleNamespace(ended_ones=list, cut_off=self._cut_off)
        self.succession = Succession(node, self.steps, nothing, nothing, nothing, endings)
        monkeypatch.setattr(succession, "answers", self._machine)

    async def _cut_off(self, entries: list[RankEntry], why: str) -> None:
        self.cut_off += [(entry.uid, why) for entry in entries]

    async def _machine(self, _endpoint: str, *, if_unknown: bool) -> bool:
        return self.machine or self.former is not None

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> AsyncIterator[Any]:
        async def outcome(request: pb.MoveRequest, timeout_s: float) -> pb.Outcome:
            if self.former is None:
                raise Unreachable("no answer")
            return self.former

        async with super()._client(name, endpoint) as client:
            if name == "node-9":
                client.job.GetOutcome = outcome
            yield client

    async def succeed(self) -> None:
        request = pb.SucceedRequest(
            record=FIRST,
            former="node-9",
            former_endpoint="e9",
            successor="node-2",
            successor_endpoint="e2",
            rank_uids=[UID],
        )
        await self.succession.succeed(request, "operator")


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    made = Place(tmp_path, monkeypatch)
    yield made
    await made.stop()


async def test_coordinator_that_answers_is_not_replaced(place: Place) -> None:
    place.former = pb.Outcome(kind=pb.COMMIT)
    with pytest.raises(WrongState, match="node-9 answers"):
        await place.succeed()
    place.former, place.machine = None, True
    with pytest.raises(WrongState, match="is there"):
        await place.succeed()
    assert place.entry.coordinator_node == "node-9"


@pytest.mark.parametrize("former", [None, pb.Outcome(kind=pb.COMMIT, handed_to="node-2")])
async def test_successor_of_a_coordinator_that_has_left_is_obeyed(place: Place, former: pb.Outcome | None) -> None:
    place.former = former
    await place.succeed()
    stored = Ranks(place.registry.folder.parent).get(UID, "home")
    assert stored is not None
    assert (stored.coordinator_node, stored.coordinator_endpoint, stored.tethered) == ("node-2", "e2", True)
    assert place.image.whole().successor_node == "node-2"
    place.former = pb.Outcome(kind=pb.COMMIT)
    await place.succeed()  # nothing is bound to the former one any more: it is not even asked


async def test_coordinator_that_has_handed_over_never_rolls_back(place: Place) -> None:
    await place.take(FIRST)
    assert (await place.succession.hand_over(FIRST, "node-2", "operator")).handed_to == "node-2"
    await place.succession.hand_over(FIRST, "node-2", "operator")
    assert records.current(place.journal) == []
    with pytest.raises(NotFound):
        await place.roll_back(FIRST)
    with pytest.raises(WrongState, match="handed over to node-2"):
        await place.succession.hand_over(FIRST, "node-3", "operator")


async def test_job_that_was_rolled_back_is_not_handed_over(place: Place) -> None:
    await place.take(FIRST)
    await place.roll_back(FIRST)
    with pytest.raises(WrongState, match="rolled back already"):
        await place.succession.hand_over(FIRST, "node-2", "operator")


async def test_successor_keeps_a_complete_snapshot_to_which_it_can_roll_back(place: Place) -> None:
    parts = [
        pb.Participant(rank_uid=f"train-{rank}", rank=rank, move=f"m-{16 + rank:012x}", node=f"node-{rank + 1}")
        for rank in (0, 1)
    ]
    request = pb.AdoptRequest(
        record=FIRST,
        job="train",
        user_id=7,
        participants=parts,
        former="node-9",
        former_endpoint="e9",
        lost_nodes=["node-9"],
        copies=2,
    )
    place.former = pb.Outcome(kind=pb.COMMIT)
    with pytest.raises(WrongState):
        await place.succession.adopt(request, "operator")
    place.former = None
    for _ in range(2):
        assert (await place.succession.adopt(request, "operator")).kind == pb.COMMIT
    assert [one.copies for one in (await place.steps.listed()).jobs] == [2]
    place.ranks["node-2"] = [
        pb.Rank(uid="train-1", rank=1, place=pb.Rank.HERE, incarnation="m-0000000000dd")
    ]  # rolled back before
    await place.roll_back(FIRST)
    assert place.journal.get("m-0000000000cc").record.ends == "m-0000000000dd"


async def test_number_of_copies_that_was_asked_for_outlives_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [("b", kept(0, "s1", copy=True)), ("c", kept(1, "s1"))]
    images[0][1].copies = 2
    for _, image in images:
        image.job, image.coordinator_node = "train", "a"
    adopted: list[pb.AdoptRequest] = []

    async def ask_all(cluster: Any, ask: Any, nodes: Any) -> tuple[dict[str, list[pb.KeptImage]], dict[str, Any]]:
        return {node: [image] for node, image in images}, {}

    async def nothing(*_: Any) -> list[pb.NodeAddresses]:
        return []

    @asynccontextmanager
    async def client(node: str) -> AsyncIterator[Any]:
        async def adopt(request: pb.AdoptRequest, timeout_s: float) -> pb.Outcome:
            adopted.append(request)
            return pb.Outcome(kind=pb.COMMIT)

        async def listed(request: pb.ListJobsRequest, timeout_s: float) -> pb.ListJobsReply:
            return pb.ListJobsReply(jobs=[pb.JobRecord(record="s1")])

        yield SimpleNamespace(job=SimpleNamespace(Adopt=adopt, List=listed))

    monkeypatch.setattr(taking_over, "ask_all", ask_all)
    monkeypatch.setattr(taking_over, "node_infos", nothing)
    monkeypatch.setattr(taking_over, "node_addresses", nothing)
    cluster: Any = SimpleNamespace(nodes={node: f"{node}:1" for node in "abc"}, client=client)
    assert (await taking_over.take_over(cluster, JobOptions("train"))) is not None
    assert [one.copies for one in adopted] == [2]


def kept(rank: int, record: str, *, copy: bool = False, begun: float = 1.0) -> pb.KeptImage:
    name = f"{record}-{rank}-{copy}"
    return pb.KeptImage(image=name, record=record, rank=rank, rank_uid=f"u{rank}", is_copy=copy, begun_unix_s=begun)


def test_newest_snapshot_that_is_whole_is_used() -> None:
    older = [("b", kept(0, "s1", copy=True)), ("b", kept(1, "s1"))]
    newer = [("b", kept(1, "s2", begun=2.0))]
    assert newest_whole([*older, *newer]) == older
    newer.append(("c", kept(0, "s2", copy=True, begun=2.0)))
    assert newest_whole([*older, *newer]) == newer
    with pytest.raises(NotFound, match="rank 0 has none"):
        newest_whole([("b", kept(1, "s1"))])


def test_rank_without_its_own_image_is_restored_from_the_copy() -> None:
    images = [("b", kept(0, "s1", copy=True)), ("b", kept(1, "s1")), ("c", kept(1, "s1", copy=True))]
    first, second = participants(images, {"b": "b:1", "c": "c:1"})
    assert (first.move, first.node, first.copy) == ("s1-0-True", "b", "")
    assert (second.move, second.node, second.copy, second.copy_node) == ("s1-1-False", "b", "s1-1-True", "c")


def test_successor_knows_which_node_has_made_an_image() -> None:
    endpoints = {node: f"{node}:1" for node in "bcd"}
    images = [("b", kept(0, "s1")), ("c", kept(0, "s1", copy=True)), ("d", kept(0, "s1", copy=True))]
    assert participants(images, endpoints)[0].made_on == "", "of an older version"
    images[1][1].made_on = "a"
    assert participants(images, endpoints)[0].made_on == "a", "a node cannot make it count without a signature"
    images[2][1].made_on = "d"
    with pytest.raises(Refused, match="and d do not agree on the node that has made"):
        participants(images, endpoints)


def test_rank_keeps_all_copies_that_are_left() -> None:
    endpoints = {node: f"{node}:1" for node in "bcd"}
    images = [("c", kept(0, "s1", copy=True)), ("d", kept(0, "s1", copy=True)), ("b", kept(0, "s1"))]
    (whole,) = participants(images, endpoints)
    assert [(copy.node, copy.endpoint) for copy in copies_of(whole)] == [("c", "c:1"), ("d", "d:1")]
    (part,) = participants(images[:2], endpoints)
    assert (part.node, nodes_of(part)) == ("c", ["d"]), "its own image is lost"
