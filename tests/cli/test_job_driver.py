"""What the driver of a suspension or resumption says: only what nodes have confirmed; and what it checks beforehand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.find_rank import Found
from migrator.job_results import JobOptions
from migrator.jobs import finding, homes, walk
from migrator.jobs.finding import find_running
from migrator.jobs.resume import Resumption
from migrator.jobs.suspend import Suspension
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError, Unreachable

RANKS = [
    Found(f"node-{number + 1}", pb.Rank(uid=f"night-{number}", job="night", rank=number, place=pb.Rank.HERE))
    for number in (0, 1)
]


class Cluster:
    """Nodes that answer what the test says; those without an answer are silent."""

    def __init__(self, **answers: Any) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in (1, 2, 3)}
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        if node not in self.answers:
            raise Unreachable(f"{node} does not answer")

        async def answer(request: Any, timeout_s: float) -> Any:
            return self.answers[node]

        async def discarded(request: Any, timeout_s: float) -> pb.DiscardReply:
            return pb.DiscardReply()

        yield SimpleNamespace(
            source=SimpleNamespace(Abort=answer),
            target=SimpleNamespace(Discard=discarded, GetCopy=answer),
            node=SimpleNamespace(ListRanks=answer),
        )


def suspension(cluster: Any) -> Suspension:
    return Suspension(cluster, JobOptions("night"), RANKS, RANKS[0].node, lambda event: None)


def resumption(cluster: Any) -> Resumption:
    parts = [pb.Participant(rank_uid=one.rank.uid, rank=one.rank.rank, move="m-1", node=one.node) for one in RANKS]
    record = pb.JobRecord(record="m-000000000001", job="night", participants=parts)
    return Resumption(cluster, JobOptions("night"), "node-1", record, lambda event: None)


async def test_undone_suspension_names_the_nodes_that_have_not_confirmed_it() -> None:
    run = suspension(Cluster(node_1=pb.Outcome(kind=pb.ABORT, settled=True)))
    await run.abort(1.0)
    assert run.unconfirmed == ["rank 1: not confirmed by node-2: node-2 does not answer"]
    assert "except (rank 1: not confirmed by node-2" in walk._after_undo(run)
    await run.close()


async def test_rank_that_is_not_thawed_yet_is_not_confirmed() -> None:
    thawed, frozen = pb.Outcome(kind=pb.ABORT, settled=True), pb.Outcome(kind=pb.ABORT, reason="its keeper is away")
    run = suspension(Cluster(node_1=thawed, node_2=frozen))
    await run.abort(1.0)
    assert run.unconfirmed == ["rank 1: not confirmed by node-2: it is not thawed yet: its keeper is away"]
    await run.close()


async def test_undo_that_all_nodes_have_confirmed_is_stated_plainly() -> None:
    run = suspension(Cluster(**dict.fromkeys(("node_1", "node_2"), pb.Outcome(kind=pb.ABORT, settled=True))))
    await run.abort(1.0)
    assert walk._after_undo(run) == "running, as before"
    await run.close()


async def test_undone_resumption_names_copies_that_are_not_dropped() -> None:
    run = resumption(Cluster(node_1=pb.Copy(state=pb.Copy.DISCARDED), node_2=pb.Copy(state=pb.Copy.HELD)))
    await run.discard(1.0)
    assert run.unconfirmed == ["rank 1: not confirmed by node-2: its copy is not dropped yet: held"]
    await run.close()


# ---------------------------------------------------------------- the launcher


async def test_rank_whose_keeper_lives_may_be_resumed() -> None:
    away = pb.ListRanksReply(ranks=[pb.Rank(uid="night-0", place=pb.Rank.AWAY, at_node="node-1")])
    cluster: Any = Cluster(node_1=away)
    kept, silent = await homes.kept_on(cluster, ["node-1", "node-1"])
    assert (kept, silent) == ({"node-1": {"night-0"}}, {})
    assert homes.check(pb.Rank(uid="night-0", home_node="node-1"), kept, silent).verdict == pb.Check.PASS


async def test_rank_whose_keeper_has_ended_is_refused() -> None:
    only_image = pb.ListRanksReply(ranks=[pb.Rank(uid="night-0", place=pb.Rank.SUSPENDED)])
    cluster: Any = Cluster(node_1=only_image)
    found = homes.check(pb.Rank(uid="night-0", home_node="node-1"), *await homes.kept_on(cluster, ["node-1"]))
    assert (found.name, found.verdict) == ("resume-home", pb.Check.REFUSE)
    assert "its keeper on node-1 has ended" in found.reason
    assert "migrator job drop" in found.remedy


@pytest.mark.parametrize("home", ["node-2", "elsewhere"])
async def test_rank_whose_home_node_does_not_answer_is_refused_by_its_name(home: str) -> None:
    cluster: Any = Cluster()
    found = homes.check(pb.Rank(uid="night-0", home_node=home), *await homes.kept_on(cluster, [home]))
    assert found.verdict == pb.Check.REFUSE
    assert home in found.reason


# ---------------------------------------------------------------- the ranks of a running job


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Found], dict[str, SnapshotError]]:
    found: list[Found] = []
    silent: dict[str, SnapshotError] = {}

    async def all_ranks(cluster: Any) -> tuple[list[Found], dict[str, SnapshotError]]:
        return found, silent

    monkeypatch.setattr(finding, "all_ranks", all_ranks)
    return found, silent


Listed = tuple[list[Found], dict[str, SnapshotError]]
CLUSTER: Any = None


async def test_silent_node_without_a_rank_of_the_job_is_only_a_warning(listed: Listed) -> None:
    listed[0].extend(RANKS)
    assert await find_running(CLUSTER, "night", None) == (RANKS, [])
    listed[1]["node-3"] = Unreachable("node-3 does not answer")
    found, warnings = await find_running(CLUSTER, "night", None)
    assert (found, len(warnings)) == (RANKS, 1)
    assert "node-3 did not answer" in warnings[0]


async def test_silent_node_that_may_have_a_missing_rank_is_refused(listed: Listed) -> None:
    listed[0].extend(RANKS[1:])
    listed[1]["node-1"] = Unreachable("node-1 does not answer")
    with pytest.raises(Unreachable, match="ranks of job night are missing"):
        await find_running(CLUSTER, "night", None)
    listed[0].clear()
    with pytest.raises(Unreachable, match="no node that answers has ranks"):
        await find_running(CLUSTER, "night", None)
    listed[1].clear()
    with pytest.raises(NotFound):
        await find_running(CLUSTER, "night", None)


async def test_rank_that_should_be_on_a_silent_node_is_refused(listed: Listed) -> None:
    away = Found("node-1", pb.Rank(uid="night-1", job="night", rank=1, place=pb.Rank.AWAY, at_node="node-3"))
    listed[0].extend([RANKS[0], away])
    listed[1]["node-3"] = Unreachable("node-3 does not answer")
    with pytest.raises(Unreachable, match="should be on node-3"):
        await find_running(CLUSTER, "night", None)
