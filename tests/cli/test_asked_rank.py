"""A node that reports about another rank than the one that it was asked about is refused, whatever a driver asks it for."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator import asked_rank
from migrator.find_rank import Found
from migrator.job_results import JobOptions
from migrator.jobs import finding, succession
from migrator.jobs.finding import find_running
from migrator.jobs.resume import Resumption
from migrator.jobs.rollback import _places
from migrator.jobs.snapshot import Snapshot
from migrator.jobs.suspend import Suspension
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, NotFound, Refused, SnapshotError, Unreachable, Where

HERE = pb.Rank.HERE
RANKS = [pb.Rank(uid=f"night-{number}", job="night", rank=number, user_id=7, place=HERE) for number in (0, 1)]
FOUND = [Found(f"node-{rank.rank + 1}", rank) for rank in RANKS]
LIES: list[dict[str, Any]] = [{"uid": "other-1"}, {"job": "other"}, {"user_id": 8}, {"rank": 2}]


def like(one: pb.Rank, **other: Any) -> pb.Rank:
    changed = pb.Rank()
    changed.CopyFrom(one)
    changed.MergeFrom(pb.Rank(**other))
    return changed


class Cluster:
    """Each node reports about the rank that the test says; one without is silent."""

    def __init__(self, **reported: pb.Rank) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in (1, 2, 3)}
        self.labels: dict[str, dict[str, str]] = {}
        self.reported = {name.replace("_", "-"): rank for name, rank in reported.items()}

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        if node not in self.reported:
            raise Unreachable(f"{node} does not answer")
        facts = pb.RankFacts(rank=self.reported[node], source_node=node)

        async def inspect(request: pb.InspectRequest, timeout_s: float) -> pb.InspectReply:
            return pb.InspectReply(facts=facts)

        async def get_image(request: pb.MoveRequest, timeout_s: float) -> pb.StoredImage:
            return pb.StoredImage(facts=facts)

        yield SimpleNamespace(source=SimpleNamespace(Inspect=inspect, GetImage=get_image))


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def infos(cluster: Any) -> dict[str, pb.NodeInfo]:
        return {node: pb.NodeInfo(name=node) for node in cluster.nodes}

    async def addresses(cluster: Any, infos: Any) -> list[pb.NodeAddresses]:
        return []

    for module in (sys.modules["migrator.jobs.suspend"], sys.modules["migrator.jobs.resume"]):
        monkeypatch.setattr(module, "node_infos", infos)
        monkeypatch.setattr(module, "node_addresses", addresses)


def record() -> pb.JobRecord:
    parts = [
        pb.Participant(
            rank_uid=one.rank.uid,
            rank=one.rank.rank,
            move=f"m-{one.rank.rank}",
            node=one.node,
            copy=f"m-{one.rank.rank + 8}",
            copy_node="node-3",
        )
        for one in FOUND
    ]
    return pb.JobRecord(record="m-000000000001", job="night", user_id=7, participants=parts)


def test_the_error_names_both_ranks_and_the_node() -> None:
    asked_rank.must_be(like(RANKS[0], at_node="node-9"), RANKS[0], "node-1")
    with pytest.raises(Refused) as caught:
        asked_rank.must_be(like(RANKS[0], uid="x" * 1000), RANKS[0], "node-1")
    assert "node-1 was asked about rank 0 of job night" in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("run_of", [Suspension, Snapshot])
@pytest.mark.parametrize("lie", LIES)
async def test_suspensions_and_snapshots_refuse_facts_of_another_rank(
    run_of: type[Suspension], lie: dict[str, Any]
) -> None:
    cluster: Any = Cluster(node_1=RANKS[0], node_2=like(RANKS[1], **lie))
    run = run_of(cluster, JobOptions("night"), FOUND, "node-1", lambda event: None)
    with pytest.raises(Refused, match="node-2 was asked about rank 1 of job night"):
        await run.inspect(1.0)
    await run.close()


@pytest.mark.parametrize("lie", LIES)
async def test_resumption_uses_the_copy_if_the_node_of_the_image_reports_another_rank(lie: dict[str, Any]) -> None:
    wrong = like(RANKS[1], **lie)
    cluster: Any = Cluster(node_1=RANKS[0], node_2=wrong, node_3=RANKS[1])
    run = Resumption(cluster, JobOptions("night"), "node-1", record(), lambda event: None)
    await run.read_images(1.0)
    assert [part.image_node for part in run.participants] == ["node-1", "node-3"]
    await run.close()
    cluster = Cluster(node_1=RANKS[0], node_2=wrong, node_3=wrong)
    run = Resumption(cluster, JobOptions("night"), "node-1", record(), lambda event: None)
    with pytest.raises(Refused, match="node-3 was asked about rank 1 of job night"):
        await run.read_images(1.0)
    await run.close()


@pytest.mark.parametrize("lie", LIES)
async def test_rollback_uses_the_copy_if_the_node_of_the_image_reports_another_rank(lie: dict[str, Any]) -> None:
    wrong = like(RANKS[1], **lie)
    cluster: Any = Cluster(node_1=RANKS[0], node_2=wrong, node_3=RANKS[1])
    places = await _places(cluster, record(), list(cluster.nodes), [], Where.UNTOUCHED)
    assert {rank: place.node for rank, place in places.items()} == {0: "node-1", 1: "node-3"}
    cluster = Cluster(node_1=RANKS[0], node_2=wrong)
    with pytest.raises(Refused, match="node-2 was asked about rank 1 of job night"):
        await _places(cluster, record(), list(cluster.nodes), [], Where.UNTOUCHED)


async def test_whichever_copy_answers_is_used() -> None:
    known = record()
    known.participants[1].more_copies.add(move="m-17", node="node-1", endpoint="e")
    cluster: Any = Cluster(node_1=RANKS[1])
    places = await _places(
        cluster,
        pb.JobRecord(job="night", user_id=7, participants=[known.participants[1]]),
        ["node-1"],
        [],
        Where.UNTOUCHED,
    )
    assert {rank: place.node for rank, place in places.items()} == {1: "node-1"}
    del known.participants[0]
    run = Resumption(cluster, JobOptions("night"), "node-1", known, lambda event: None)
    await run.read_images(1.0)
    (part,) = run.participants
    assert (part.image, part.image_node) == ("m-17", "node-1")
    await run.close()
    with pytest.raises(
        NotFound, match="none of the nodes that kept the image of rank 1 has it: node-2, node-3, node-1"
    ):
        await _places(cluster, known, [], [], Where.UNTOUCHED)


async def test_rank_that_two_nodes_claim_is_not_chosen_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_ranks(cluster: Any) -> tuple[list[Found], dict[str, SnapshotError]]:
        return [*FOUND, Found("node-3", RANKS[0])], {}

    monkeypatch.setattr(finding, "all_ranks", all_ranks)
    cluster: Any = None
    with pytest.raises(Ambiguous, match="node-1 and node-3 both say that they have rank 0 of job night"):
        await find_running(cluster, "night", None)


async def test_rank_that_is_invented_before_all_others_does_not_make_its_node_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def all_ranks(cluster: Any) -> tuple[list[Found], dict[str, SnapshotError]]:
        return [*FOUND, Found("node-3", like(RANKS[0], uid="night-x-0badcafe", rank=-1))], {}

    monkeypatch.setattr(finding, "all_ranks", all_ranks)
    cluster: Any = None
    with pytest.raises(Refused, match="node-3 says that it has rank -1 of job night"):
        await find_running(cluster, "night", None)


def test_images_of_different_ranks_with_one_number_are_not_put_together() -> None:
    image: dict[str, Any] = {"record": "m-1", "job": "night", "rank": 0}
    own, copy = pb.KeptImage(rank_uid="night-0", **image), pb.KeptImage(rank_uid="other-0", is_copy=True, **image)
    endpoints = {"node-1": "e", "node-2": "e"}
    with pytest.raises(Refused, match="node-1 and node-2 name different processes as rank 0"):
        succession.participants([("node-1", own), ("node-2", copy)], endpoints)
