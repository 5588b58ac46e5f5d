"""What the driver of a suspension or resumption says: only what nodes have confirmed; and what it checks beforehand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.find_rank import Found
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions
from migrator.jobs import finding, gates, homes, walk
from migrator.jobs.finding import find_running, must_be_same
from migrator.jobs.resume import Resumption
from migrator.jobs.suspend import Suspension
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError, Unreachable, WrongState

RANKS = [
    Found(f"node-{number + 1}", pb.Rank(uid=f"night-{number}", job="night", rank=number, place=pb.Rank.HERE))
    for number in (0, 1)
]


class Cluster:
    """Nodes that answer what the test says; those without an answer are silent."""

    def __init__(self, **answers: Any) -> None:
        self.nodes = {f"node-{number}": f"10.0.0.{number}:7070" for number in (1, 2, 3)}
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.silent_s: dict[str, float] = {}

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        if node not in self.answers:
            raise Unreachable(f"{node} does not answer")

        async def answer(request: Any, timeout_s: float) -> Any:
            return self.answers[node]

        async def discarded(request: Any, timeout_s: float) -> pb.DiscardReply:
            return pb.DiscardReply()

        async def reported(request: Any, timeout_s: float, *, retry: bool) -> Any:
            return self.answers[node]

        yield SimpleNamespace(
            source=SimpleNamespace(Abort=answer),
            target=SimpleNamespace(Discard=discarded, GetCopy=answer),
            node=SimpleNamespace(ListRanks=answer),
            job=SimpleNamespace(Attach=answer),
            gate=SimpleNamespace(Report=reported),
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


# ---------------------------------------------------------------- NCCL


@pytest.mark.parametrize("answer", [None, pb.AttachReply(abandoned="rank 1 has ended"), pb.AttachReply()])
async def test_undo_names_communicators_that_are_not_built_again(answer: pb.AttachReply | None) -> None:
    run = suspension(Cluster(**({"node_1": answer} if answer is not None else {})))
    await run.put_back(1.0)
    said = walk._after_undo(run)
    assert (said == "running, as before") == (answer == pb.AttachReply())
    assert ("rank 1 has ended" in said) == (answer is not None and bool(answer.abandoned))
    await run.close()


class Recorded(Suspension):
    """A suspension whose steps are only recorded, and whose freeze fails."""

    @property
    def steps(self) -> dict[str, Any]:
        return {call: self._record(call) for call in super().steps}

    def _record(self, call: str) -> Any:
        async def record(timeout_s: float) -> None:
            ASKED.append(call)
            if call == "Source.Freeze":
                raise Unreachable("node-2 does not answer")

        return record


ASKED: list[str] = []


@pytest.mark.parametrize("nccl", [False, True])
async def test_gates_are_closed_and_put_back_only_for_jobs_with_communicators(
    nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def aborted(run: Any, reason: str) -> pb.Outcome:
        return pb.Outcome(kind=pb.ABORT)

    monkeypatch.setattr(walk, "_abort", aborted)
    ASKED.clear()
    cluster: Any = Cluster()
    run = Recorded(cluster, JobOptions("night"), RANKS, RANKS[0].node, lambda event: None)
    run.nccl = nccl
    result = await walk.drive(run)
    assert (result.outcome, result.state) == (JobVerdict.UNDONE, "running, as before")
    quiesce, attach = (["Gate.Close", "Job.Detach"], ["Job.Attach"]) if nccl else ([], [])
    before = ["Source.Inspect", "Job.Begin", "Source.Begin"]
    assert [*before, *quiesce, "Source.Freeze", "Source.Abort", *attach] == ASKED


def world(rank: int, **more: Any) -> pb.GateReport:
    comm = pb.Communicator(id="0" * 16, nranks=2, rank=rank, state="live", **more)
    return pb.GateReport(processes=[pb.ProcessGate(rank_uid=f"night-{rank}", rank=rank, pid=7, communicators=[comm])])


async def test_preflight_finds_communicators_and_refuses_what_cannot_be_taken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "LOOK_S", 0.0)

    async def checks(*reports: pb.GateReport) -> tuple[bool, list[str]]:
        cluster: Any = Cluster(node_1=reports[0], node_2=reports[1])
        run = suspension(cluster)
        found = await run.gates.check(run.description, ["node-1", "node-2"])
        return run.gates.involved, [one.name for one in found if one.verdict == pb.Check.REFUSE]

    assert await checks(pb.GateReport(), pb.GateReport()) == (False, [])
    assert await checks(world(0), world(1)) == (True, [])
    assert await checks(world(0), world(1, refusals=["it is one of MPI"])) == (True, ["nccl"])
    assert await checks(world(0), pb.GateReport()) == (True, ["nccl-members"])


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


def test_job_of_the_same_name_with_other_ranks_is_not_the_one_that_was_meant() -> None:
    meant = JobOptions("night", uids=frozenset({"night-0", "night-1"}))
    must_be_same(meant, RANKS)
    must_be_same(JobOptions("night"), RANKS[:1])
    again = Found("node-2", pb.Rank(uid="night-9", job="night", rank=1, place=pb.Rank.HERE))
    for found in ([RANKS[0], again], RANKS[:1], [*RANKS, again]):
        with pytest.raises(WrongState, match="job night is not the one that was meant"):
            must_be_same(meant, found)


async def test_rank_that_should_be_on_a_silent_node_is_refused(listed: Listed) -> None:
    away = Found("node-1", pb.Rank(uid="night-1", job="night", rank=1, place=pb.Rank.AWAY, at_node="node-3"))
    listed[0].extend([RANKS[0], away])
    listed[1]["node-3"] = Unreachable("node-3 does not answer")
    with pytest.raises(Unreachable, match="should be on node-3"):
        await find_running(CLUSTER, "night", None)
