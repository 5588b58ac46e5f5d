"""What nodes say about the progress of ranks becomes alarms by job, and a rule moves a straggler when that pays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from migrator.autopilot import convert, progress_feed
from migrator.autopilot.decide import RankDecision, StragglerFacts, straggler_waits
from migrator.autopilot.facts import about_node, about_ranks
from migrator.autopilot.model import (
    Alarm,
    CommunicatorProgress,
    Loss,
    MoveState,
    NodeProgress,
    RankProgress,
    Severity,
)
from migrator.autopilot.policy import Progress
from migrator.autopilot.progress import STALL, STRAGGLER, Jobs
from migrator.autopilot.ruled import ruled
from migrator.autopilot.store import Store
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import results, running, until
from tests.autopilot.worlds import NOW, TAINTED, acting, move, node, rank, world
from tests.cli.conftest import Migrator, a_rank

PERIOD_MS = 100
FIRST = int(NOW * 1000 / PERIOD_MS)
COMM = 0xABCDEF


def counts(number: int, behind: bool, changes_at: int, first: int = FIRST) -> tuple[int, int]:
    """A job that makes a collective in two readings, and from `changes_at` on in four. Then one rank is behind."""
    before, after = min(number, changes_at) - first, max(0, number - changes_at)
    done = 1000 + before // 2 + after // 4
    return (done, done) if behind and after else (done + 1, done + 1)


def said(uid: str, member: int, numbers: range, *, slow: bool = False) -> RankProgress:
    both = [counts(number, slow, FIRST + 100) for number in numbers]
    early, late = tuple(one for one, _ in both), tuple(one for _, one in both)
    comm = CommunicatorProgress(COMM, 3, member, tuple(numbers), early, late)
    return RankProgress(uid, "nccl", 0.0, 1.0, (comm,))


RANKS = [rank(0, "node-1"), rank(1, "node-2"), rank(2, "node-3")]


def tell(jobs: Jobs, numbers: range, slow: int | None = 1, ahead_s: Mapping[str, float] = MappingProxyType({})) -> None:
    """All nodes answer."""
    for one in RANKS:
        report = said(one.uid, one.rank, numbers, slow=one.rank == slow)
        answer = NodeProgress(one.node, PERIOD_MS, ahead_s.get(one.node, 0.0), 0.001, (report,))
        jobs.take(answer, [one], at(numbers[0]) - 1)


def at(number: int) -> float:
    return number * PERIOD_MS / 1000


def test_the_slow_rank_is_named_with_what_it_costs() -> None:
    jobs = Jobs(Progress())
    tell(jobs, range(FIRST, FIRST + 90))
    assert jobs.alarms(at(FIRST + 90)) == []
    tell(jobs, range(FIRST + 90, FIRST + 200))
    (alarm,) = jobs.alarms(at(FIRST + 200))
    assert (alarm.node, alarm.check, alarm.subject) == ("node-2", STRAGGLER, f"rank:{RANKS[1].uid}")
    assert alarm.severity is Severity.WARNING
    assert alarm.loss is not None
    assert 0.4 < alarm.loss.share < 0.6
    assert 2 < alarm.loss.lost_s < 5
    assert alarm.loss.confirmed
    assert "rank 1 of job train keeps the 2 other ranks waiting" in alarm.text


def test_a_uniform_job_raises_nothing() -> None:
    jobs = Jobs(Progress())
    tell(jobs, range(FIRST, FIRST + 200), slow=None)
    assert jobs.alarms(at(FIRST + 200)) == []


def test_readings_that_arrive_in_pieces_are_put_together() -> None:
    jobs = Jobs(Progress())
    for first in range(FIRST, FIRST + 200, 10):
        for one in RANKS:
            report = said(one.uid, one.rank, range(first, first + 10), slow=one.rank == 1)
            jobs.take(NodeProgress(one.node, PERIOD_MS, 0.0, 0.001, (report,)), [one], at(first) - 30)
            jobs.alarms(at(first + 10))
    assert [alarm.check for alarm in jobs.alarms(at(FIRST + 200))] == [STRAGGLER]


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    jobs = Jobs(Progress())
    tell(jobs, range(FIRST, FIRST + 200))
    liar = NodeProgress("node-9", PERIOD_MS, 0.0, 0.001, (said(RANKS[1].uid, 1, range(FIRST, FIRST + 200)),))
    jobs.take(liar, [], at(FIRST))  # it does not even list the rank
    assert [alarm.check for alarm in jobs.alarms(at(FIRST + 200))] == [STRAGGLER]


def test_a_member_that_two_nodes_claim_leads_to_nothing() -> None:
    jobs = Jobs(Progress())
    claimed = replace(RANKS[1], node="node-9")
    for first in range(FIRST, FIRST + 200, 50):
        liar = NodeProgress("node-9", PERIOD_MS, 0.0, 0.001, (said(claimed.uid, 1, range(first, first + 50)),))
        jobs.take(liar, [claimed], at(first) - 1)
        tell(jobs, range(first, first + 50))
        assert jobs.alarms(at(first + 50)) == []


def test_a_clock_that_differs_is_not_compared() -> None:
    jobs = Jobs(Progress())
    tell(jobs, range(FIRST, FIRST + 200), ahead_s={"node-3": 5.0})
    assert jobs.alarms(at(FIRST + 200)) == []


def test_an_alarm_survives_a_restart_and_goes_on_counting() -> None:
    before = Jobs(Progress())
    tell(before, range(FIRST, FIRST + 200))
    (known,) = before.alarms(at(FIRST + 200))
    after = Jobs(Progress())
    after.resume([known], at(FIRST + 200))
    after.forget(RANKS)
    assert after.alarms(at(FIRST + 201)) == [known]
    tell(after, range(FIRST + 201, FIRST + 260))
    (alarm,) = after.alarms(at(FIRST + 260))
    assert alarm.loss is not None
    assert known.loss is not None
    assert alarm.loss.lost_s > known.loss.lost_s
    assert alarm.since_unix_s == known.since_unix_s
    # Its rank has moved: the alarm is over.
    after.forget([RANKS[0], replace(RANKS[1], node="spare-1"), RANKS[2]])
    assert after.alarms(at(FIRST + 261)) == []


# ---------------------------------------------------------------------- stalls


def stalled(jobs: Jobs, seconds: list[float], measure: str = "nccl", usual_s: float = 1.0) -> list[Alarm]:
    for one, unchanged_s in zip(RANKS, seconds, strict=True):
        report = RankProgress(one.uid, measure, unchanged_s, usual_s)
        jobs.take(NodeProgress(one.node, PERIOD_MS, 0.0, 0.001, (report,)), [one], NOW)
    return jobs.alarms(NOW)


def test_a_rank_that_stands_still_while_others_do_not_is_stalled() -> None:
    (alarm,) = stalled(Jobs(Progress()), [3.0, 700.0, 2.0], "tcp")
    assert (alarm.check, alarm.subject, alarm.severity) == (STALL, f"rank:{RANKS[1].uid}", Severity.WARNING)
    assert "neither sent nor received anything for at least 660 s" in alarm.text
    assert "2 of the 3 ranks of its job still do" in alarm.text


def test_a_job_that_stands_still_as_a_whole_is_one_notice() -> None:
    (alarm,) = stalled(Jobs(Progress()), [700.0, 701.0, 702.0])
    assert (alarm.subject, alarm.severity) == (f"rank:{RANKS[0].uid}", Severity.NOTICE)


def test_a_rank_that_often_stands_still_for_long_is_not_stalled() -> None:
    assert stalled(Jobs(Progress()), [3.0, 700.0, 2.0], usual_s=400.0) == []
    assert len(stalled(Jobs(Progress(stall_s=5)), [3.0, 700.0, 2.0], usual_s=300.0)) == 1


# ---------------------------------------------------------------------- decisions

LOSS = Loss(RANKS[1].job_key, 0.4, 61.0, 10.0, 6.0, 2, confirmed=True)
SLOW = Alarm("node-2", STRAGGLER, f"rank:{RANKS[1].uid}", Severity.WARNING, "it is slow", NOW - 150, loss=LOSS)


def test_a_straggler_is_moved_when_the_loss_exceeds_the_expected_pause() -> None:
    there = world(node("node-1"), node("node-2", state=TAINTED), node("node-3"), node("spare-1"), *RANKS, SLOW)
    policy = acting()
    (about,) = about_ranks(there, policy, NOW)
    assert (about.decision, about.target, about.rank.uid) == (RankDecision.MOVE, "spare-1", RANKS[1].uid)
    assert (
        "61 s were lost so far, at 40% of the job's time, and a move is expected to pause it for 60 s" in about.reason
    )
    early = replace(there, alarms=(replace(SLOW, loss=replace(LOSS, lost_s=59.0)),))
    assert "59 s were lost" in ruled(policy, early.alarms[0], NOW).waits
    healthy = replace(early, nodes={**early.nodes, "node-2": node("node-2")})
    assert about_node(healthy, policy, healthy.nodes["node-2"], NOW).decision == "suspect"


def test_the_pause_that_was_measured_counts_before_the_policys() -> None:
    past = move(RANKS[0], "spare-2", MoveState.MOVED, 100, pause_s=12.0)
    cheap = replace(SLOW, loss=replace(LOSS, lost_s=13.0))
    assert ruled(acting(), cheap, NOW).waits
    assert not ruled(acting(), cheap, NOW, [past]).waits
    assert "for 12 s, as the last one did" in ruled(acting(), cheap, NOW, [past]).cause


def test_a_rank_that_is_slow_wherever_it_runs_is_not_moved_again() -> None:
    here = move(RANKS[1], "node-2", MoveState.MOVED, 90_000, cause=f"rule x: {STRAGGLER} on rank:{RANKS[1].uid}: slow")
    waits = ruled(acting(), SLOW, NOW, [here]).waits
    assert "it was moved to node-2 for this before" in waits


def test_what_one_other_node_says_alone_moves_nothing() -> None:
    assert "only one other node" in straggler_waits(StragglerFacts(100, 0.5, 10, measured=True, confirmed=False))[0]
    jobs, pair = Jobs(Progress()), [RANKS[0], replace(RANKS[1], node="node-3")]
    for one in pair:
        both = replace(
            said(one.uid, one.rank, range(FIRST, FIRST + 200), slow=one.rank == 1).communicators[0], nranks=2
        )
        answer = NodeProgress(one.node, PERIOD_MS, 0.0, 0.001, (RankProgress(one.uid, "nccl", 0.0, 1.0, (both,)),))
        jobs.take(answer, [one], at(FIRST) - 1)
    (alarm,) = jobs.alarms(at(FIRST + 200))
    assert (alarm.node, alarm.severity) == ("node-3", Severity.NOTICE)


def test_a_rule_for_critical_alarms_does_not_act_on_stragglers() -> None:
    policy = acting(rules=[{"name": "all", "action": "drain"}])
    assert ruled(policy, SLOW, NOW).rule is None


# ---------------------------------------------------------------------- the store, and answers of nodes


async def test_only_the_beginning_and_the_end_of_an_alarm_are_recorded(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        assert await store.set_job_alarms([SLOW])
        assert await store.set_job_alarms([replace(SLOW, loss=replace(LOSS, lost_s=70.0))])
        assert not await store.set_job_alarms([replace(SLOW, loss=replace(LOSS, lost_s=70.0))])
        (known,) = (await store.load(NOW)).alarms
        assert known.loss is not None
        assert known.loss.lost_s == 70.0
        assert await store.set_job_alarms([])
        assert (await store.load(NOW)).alarms == ()
        assert [one.text.split(":")[0] for one in await store.events()] == ["raised", "cleared"]


async def test_all_moves_of_a_straggler_are_known_however_old(tmp_path: Path) -> None:
    async with Store.open(tmp_path, lambda: NOW - 1e6) as store:
        past = move(RANKS[1], "node-2", MoveState.INTENDED)
        await store.intend(past)
        await store.finish(past.id, MoveState.MOVED, "", 2.0)
        assert (await store.load(NOW)).moves == ()
        await store.set_job_alarms([SLOW])
        assert [one.id for one in (await store.load(NOW)).moves] == [past.id]


def test_watch_shows_alarms_about_jobs_as_long_as_they_are_renewed(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path
) -> None:
    async def raised(last_unix_s: float) -> None:
        async with Store.open(tmp_path / "state") as store:
            await store.set_job_alarms([replace(SLOW, last_unix_s=last_unix_s)])

    asyncio.run(raised(time.time()))
    (alarm,) = migrator("watch", "--once", "--json").json["alarms"]
    assert (alarm["node"], alarm["check"], alarm["severity"]) == ("node-2", STRAGGLER, "warning")
    asyncio.run(raised(time.time() - 1000))
    assert migrator("watch", "--once", "--json").json["alarms"] == []


def test_explain_says_what_is_lost_and_what_a_move_costs(
    pilots: PilotCluster, migrator: Migrator, tmp_path: Path
) -> None:
    async def raised() -> None:
        async with Store.open(tmp_path / "state") as store:
            await store.set_job_alarms([replace(SLOW, since_unix_s=time.time() - 50, loss=replace(LOSS, lost_s=20.0))])

    asyncio.run(raised())
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nname = "slow"\nseverity = "warning"\naction = "move"\n[progress]\npause_s = 30\n')
    shown = migrator("policy", "explain", "node-2", "--policy", str(policy)).out
    assert "rule slow: move (not yet: 20 s were lost so far" in shown
    assert "a move is expected to pause it for 30 s, as the policy says" in shown


@pytest.mark.parametrize(
    "wrong",
    [
        pb.CommunicatorProgress(nranks=2, numbers=[1, 2], early=[1], late=[1, 2]),
        pb.CommunicatorProgress(nranks=2, member=2),
        pb.CommunicatorProgress(nranks=2, numbers=range(2000), early=range(2000), late=range(2000)),
    ],
)
def test_answers_that_no_daemon_gives_are_refused(wrong: pb.CommunicatorProgress) -> None:
    reply = pb.NodeProgress(ranks=[pb.RankProgress(uid="x", communicators=[wrong])])
    with pytest.raises(Damaged):
        convert.progress("node-1", reply, 0.0, 0.0)


# ---------------------------------------------------------------------- the loop


def counting(uid: str, member: int, began: int, *, slow: bool) -> Callable[[int], pb.NodeProgress]:
    """Answers of a node whose rank is a member of a job that became slow ten seconds before the test began."""

    def progress(after: int) -> pb.NodeProgress:
        now = time.time()
        numbers = range(max(after + 1, began - 150), int(now * 1000 / PERIOD_MS))
        both = [counts(number, slow, began - 100, began - 150) for number in numbers]
        early, late = [one for one, _ in both], [one for _, one in both]
        comm = pb.CommunicatorProgress(id=COMM, nranks=3, member=member, numbers=numbers, early=early, late=late)
        rank = pb.RankProgress(uid=uid, measure=pb.RankProgress.NCCL, communicators=[comm])
        return pb.NodeProgress(now_unix_s=now, period_ms=PERIOD_MS, ranks=[rank])

    return progress


@pytest.mark.parametrize("slow", [True, False])
async def test_the_straggler_moves_by_itself_and_a_uniform_job_does_not(
    pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    monkeypatch.setattr(progress_feed, "POLL_S", 0.05)
    began = int(time.time() * 1000 / PERIOD_MS)
    for member, name in enumerate(("node-1", "node-2", "node-3")):
        pilots[name].ranks.append(a_rank(name, rank=member, uid=f"train-{member}"))
        pilots[name].progress = counting(f"train-{member}", member, began, slow=slow and member == 1)
    policy = acting(breaker={"nodes_percent": 80}, progress={"pause_s": 1})
    async with running(pilots, policy) as store:
        if slow:
            assert await results(store) == [("spare-1", "moved")]
            assert pilots.places()["train-1"] == "spare-1"
            (intent,) = [one for one in await store.events() if one.kind == "intent"]
            assert "were lost so far" in intent.text
            return

        async def polled() -> bool:
            return all(len(pilots[name].called("GetProgress")) > 10 for name in ("node-1", "node-2", "node-3"))

        await until("the nodes to be asked", polled)
        assert (await store.load()).alarms == ()
        assert pilots.begun() == 0
