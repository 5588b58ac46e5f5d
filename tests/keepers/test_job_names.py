"""A job that is named after its script gets a name that no other job of its user has in the cluster."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreachable
from snapshotd.keepers import adoption, job_names
from snapshotd.keepers.job_names import OtherNodes, free_name
from tests.keepers.test_adoption import ALICE, BOB, KEEPER, RANK, adopts, hello, node

__all__ = ["adopts", "node"]  # fixtures

ELSEWHERE = {"node-2": "10.0.0.2:7070", "node-3": "10.0.0.3:7070"}


class Cluster:
    """Daemons of other nodes: the ranks of each, or an error, or None for one that never answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.asked: list[tuple[str, str]] = []

    @asynccontextmanager
    async def client(self, name: str, endpoint: str) -> Any:
        async def list_ranks(request: pb.ListRanksRequest, timeout_s: float) -> pb.ListRanksReply:
            assert request.brief, "the GPUs of a sick node would delay the start of a job"
            self.asked.append((name, endpoint))
            answer = self.answers[name]
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            return pb.ListRanksReply(ranks=answer)

        yield SimpleNamespace(node=SimpleNamespace(ListRanks=list_ranks))


def rank_of(job: str, user_id: int = ALICE, rank: int = 0) -> pb.Rank:
    return pb.Rank(job=job, user_id=user_id, rank=rank)


def attach(node: Any, cluster: Cluster, nodes: dict[str, str]) -> None:
    node.config.nodes, node.client = nodes, cluster.client


async def test_name_that_a_job_on_another_node_has_gets_a_number(node: Any, adopts: adoption.Adoption) -> None:
    cluster = Cluster(node_2=[rank_of("train"), rank_of("train-3", BOB)], node_3=[rank_of("train-2")])
    attach(node, cluster, {"node-1": "10.0.0.1:7070", **ELSEWHERE})
    await adopts.adopt(hello(alone=True), KEEPER, RANK)
    assert [entry.job for entry in node.ranks.all()] == ["train-3"]
    assert sorted(cluster.asked) == sorted(ELSEWHERE.items()), "a node does not ask itself"


async def test_only_a_job_without_a_given_name_asks_other_nodes(node: Any, adopts: adoption.Adoption) -> None:
    cluster = Cluster(node_2=[rank_of("train")], node_3=[])
    attach(node, cluster, ELSEWHERE)
    await adopts.adopt(hello(), KEEPER, RANK)
    assert [entry.job for entry in node.ranks.all()] == ["train"]
    assert not cluster.asked


async def test_silent_nodes_do_not_keep_a_job_from_starting(
    node: Any, adopts: adoption.Adoption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_names, "ASK_S", 0.01)
    attach(node, Cluster(node_2=None, node_3=Unreachable("down")), ELSEWHERE)
    await adopts.adopt(hello(alone=True), KEEPER, RANK)
    assert [entry.job for entry in node.ranks.all()] == ["train"]


async def test_jobs_that_start_together_share_the_answers(node: Any) -> None:
    cluster = Cluster(node_2=[rank_of("train")], node_3=[])
    attach(node, cluster, ELSEWHERE)
    others = OtherNodes(node)
    answers = await asyncio.gather(*(others.names() for _ in range(5)))
    assert answers == [[(ALICE, 0, "train")]] * 5
    assert len(cluster.asked) == 2


def test_same_name_of_another_user_or_another_rank_is_free() -> None:
    names = [(ALICE, 0, "train"), (BOB, 1, "train")]
    assert free_name("train", BOB, 0, names) == "train"
    assert free_name("train", ALICE, 1, names) == "train"
    assert free_name("train", ALICE, 0, names) == "train-2"
