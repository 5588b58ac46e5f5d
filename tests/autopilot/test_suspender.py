"""Jobs that the autopilot suspends and resumes, on fake daemons. Wherever it is killed, nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from migrator import jobs as real_jobs
from migrator.autopilot import report, suspender
from migrator.autopilot.engine import Engine
from migrator.autopilot.policy import Policy
from migrator.autopilot.store import Store
from migrator.autopilot.suspension import SuspensionState
from migrator.cluster import Cluster
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, RankPlace
from migrator.results import Event
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Unreachable
from tests.autopilot.conftest import PilotCluster
from tests.autopilot.test_engine import alerts, until
from tests.autopilot.test_suspending import policy as of_world
from tests.cli.conftest import Migrator, a_rank

LOW, GPT = "low-0-00000001", "gpt-3-00000001"


def policy() -> Policy:
    return of_world(breaker={"nodes_percent": 80, "back_off_s": 0, "rank_window_s": 0})


@dataclass
class FakeJobs:
    """Suspends and resumes on the fake daemons, with a record on the coordinator as a daemon keeps it.

    `stops_at`: the point where a call waits until it is cancelled, as that of a killed driver. Daemons stay as they are."""

    pilots: PilotCluster
    stops_at: str = ""
    fails: str = ""
    restarts: bool = False  # the job is started again each time it is about to be suspended
    reached: list[str] = field(default_factory=list)
    images: dict[str, pb.Rank] = field(default_factory=dict)  # by record

    @property
    def records(self) -> list[pb.JobRecord]:
        return self.pilots["spare-1"].jobs

    def record(self, number: str) -> pb.JobRecord:
        return next(one for one in self.records if one.record == number)

    async def _reach(self, point: str) -> None:
        self.reached.append(point)
        if self.stops_at == point:
            await asyncio.Event().wait()

    def commit_suspension(self, number: str) -> None:
        (rank,) = [one for one in self.pilots["spare-1"].ranks if one.uid == LOW]
        self.pilots["spare-1"].ranks.remove(rank)
        self.images[number] = rank
        self.record(number).outcome = pb.COMMIT

    def commit_resumption(self, number: str, target: str) -> None:
        attempt = self.record(number)
        attempt.outcome = pb.COMMIT
        self.record(attempt.suspension).ended_by = number
        self.pilots[target].ranks.append(self.images.pop(attempt.suspension))

    async def suspend(self, cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
        await self._reach("before suspending")
        if self.fails:
            raise Unreachable(self.fails)
        if self.restarts:
            (rank,) = [one for one in self.pilots["spare-1"].ranks if one.job == "low"]
            rank.uid = f"low-0-{len(self.reached) + 1:08x}"
            return await real_jobs.suspend(cluster, options, on_event)
        self.records.append(pb.JobRecord(record=options.record, job=options.job, user_id=options.user_id or 0))
        await self._reach("suspending")
        self.commit_suspension(options.record)
        await self._reach("suspended")
        return self._result(options.record, JobVerdict.SUSPENDED, "spare-1")

    async def resume(self, cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
        await self._reach("before resuming")
        if self.record(options.job).ended_by:
            raise NotFound("no such job is suspended")
        if self.fails:
            return self._result(options.record, JobVerdict.REFUSED, "", self.fails)
        self.records.append(pb.JobRecord(record=options.record, job="low", suspension=options.job))
        await self._reach("resuming")
        self.commit_resumption(options.record, options.on[0])
        await self._reach("resumed")
        return self._result(options.record, JobVerdict.RESUMED, options.on[0])

    def _result(self, number: str, outcome: JobVerdict, node: str, reason: str = "") -> JobResult:
        return JobResult(number, "low", 0, "spare-1", outcome, [RankPlace(0, LOW, node)], 0.1, reason=reason)


@pytest.fixture
def jobs(pilots: PilotCluster, monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    """A full spare with a rank of `low`, a rank of `gpt` that fits only there, and no room elsewhere."""
    for daemon in pilots.daemons.values():
        daemon.room_bytes = 1_000_000_000
    pilots["spare-1"].room_bytes = pilots["node-1"].room_bytes = 2_000_000_000
    pilots["spare-1"].ranks.append(a_rank("spare-1", job="low"))
    pilots["node-1"].ranks.append(a_rank("node-1", 3, job="gpt"))
    made = FakeJobs(pilots)
    monkeypatch.setattr(suspender, "jobs", made)
    monkeypatch.setattr(suspender, "LOOK_S", 0.05)
    return made


@contextlib.asynccontextmanager
async def running(pilots: PilotCluster) -> AsyncIterator[Store]:
    """An autopilot. At the end it is killed: what is in progress stays as it is."""
    async with Store.open(pilots.path.parent / "state") as store:
        engine = Engine(Cluster.read(pilots.path), policy(), store)
        task = asyncio.create_task(engine.run(asyncio.Event()))
        try:
            yield store
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def state(store: Store, wanted: SuspensionState, count: int = 1) -> None:
    async def there() -> bool:
        found = await store.suspensions()
        return len(found) == count and found[-1].state is wanted

    await until(f"{wanted}, {count} in all", there)


async def reached(jobs: FakeJobs, point: str) -> None:
    async def there() -> bool:
        return jobs.reached[-1:] == [point]

    await until(point, there)


async def moved(pilots: PilotCluster) -> None:
    async def there() -> bool:
        return pilots.places().get(GPT) == "spare-1"

    await until("the rank to move", there)


def give_room(pilots: PilotCluster) -> None:
    pilots["spare-2"].room_bytes = 2_000_000_000


async def test_job_is_suspended_and_resumed_when_there_is_room(pilots: PilotCluster, jobs: FakeJobs) -> None:
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await moved(pilots)
        assert await alerts(store, "no node has room for rank 0")
        give_room(pilots)
        await state(store, SuspensionState.RESUMED)
        assert pilots.places() == {GPT: "spare-1", LOW: "spare-2"}
        texts = [one.text for one in await store.events() if one.kind == "suspension"]
        made = report.build(await store.events(), since_unix_s=0, until_unix_s=store.now())
    why = "suspended to make room for rank 3 of gpt (priority 10 > 0)"
    assert texts[:3] == [f"job 0/low: is being {why}", f"job 0/low: {why}", "job 0/low: is being resumed on spare-2"]
    assert texts[3].startswith("job 0/low: resumed on spare-2 after ")
    found = {one.job: one for one in made.interruptions}
    low = found["0/low"]
    assert (low.outcome, low.target, low.lost_s, low.rank) == ("suspended", "spare-2", low.pause_s, report.ALL_RANKS)
    assert (low.lost_s or 0) > 0
    assert (made.total.all, made.total.resolved, made.to_json()["suspensions"]) == (2, 1, 1)
    assert jobs.reached == ["before suspending", "suspending", "suspended", "before resuming", "resuming", "resumed"]


async def test_killed_between_intent_and_suspension(pilots: PilotCluster, jobs: FakeJobs) -> None:
    jobs.stops_at = "before suspending"
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await reached(jobs, jobs.stops_at)
        await state(store, SuspensionState.SUSPENDING)
    jobs.stops_at = ""
    async with running(pilots) as store:
        await moved(pilots)
        assert [one.state for one in await store.suspensions()] == [
            SuspensionState.NEVER_BEGAN,
            SuspensionState.SUSPENDED,
        ]
        made = report.build(await store.events(), since_unix_s=0, until_unix_s=store.now() + 100)
    low = [one for one in made.interruptions if one.job == "0/low"]
    assert [(one.outcome, (one.lost_s or 0) >= 100) for one in low] == [("not suspended", False), ("suspended", True)]


@pytest.mark.parametrize("committed", [True, False])
async def test_killed_during_a_suspension(pilots: PilotCluster, jobs: FakeJobs, committed: bool) -> None:
    jobs.stops_at = "suspending"
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await reached(jobs, jobs.stops_at)
    (record,) = jobs.records
    jobs.stops_at = ""
    async with running(pilots) as store:
        looks = len(pilots["spare-1"].called("ListRanks"))

        async def looked() -> bool:
            return len(pilots["spare-1"].called("ListRanks")) > looks + 2

        await until("some rounds", looked)
        await state(store, SuspensionState.SUSPENDING)
        assert len(jobs.records) == 1, "nothing is begun before the outcome is known"
        if committed:
            jobs.commit_suspension(record.record)
        else:
            record.outcome = pb.ABORT
        await moved(pilots)
        found = [one.state for one in await store.suspensions()]
    expected = [SuspensionState.SUSPENDED]
    assert found == (expected if committed else [SuspensionState.NOT_SUSPENDED, *expected])
    assert jobs.reached.count("suspended") == (0 if committed else 1)


async def test_killed_between_suspension_and_move(pilots: PilotCluster, jobs: FakeJobs) -> None:
    jobs.stops_at = "suspended"
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await reached(jobs, jobs.stops_at)
    give_room(pilots)  # elsewhere, too: the place that was freed is taken all the same, or the new one
    jobs.stops_at = ""
    async with running(pilots) as store:
        await state(store, SuspensionState.RESUMED)

        async def placed() -> bool:
            return sorted(pilots.places().values()) == ["spare-1", "spare-2"]

        await until("both to have a place", placed)
    assert jobs.reached.count("before suspending") == 1


@pytest.mark.parametrize("point", ["before resuming", "resuming", "resumed"])
async def test_killed_during_a_resumption(pilots: PilotCluster, jobs: FakeJobs, point: str) -> None:
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await moved(pilots)
        jobs.stops_at = point
        give_room(pilots)
        await reached(jobs, point)
        await state(store, SuspensionState.RESUMING)
    jobs.stops_at = ""
    async with running(pilots) as store:
        if point == "resuming":
            await state(store, SuspensionState.RESUMING)
            jobs.records[-1].outcome = pb.ABORT
        await state(store, SuspensionState.RESUMED)
    assert pilots.places() == {GPT: "spare-1", LOW: "spare-2"}
    assert jobs.reached.count("resumed") == 1
    assert jobs.images == {}


@pytest.mark.parametrize("dropped", [True, False])
async def test_job_that_others_resume_or_drop_is_forgotten(pilots: PilotCluster, jobs: FakeJobs, dropped: bool) -> None:
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await moved(pilots)
        assert await alerts(store, "no node has room for rank 0")
        jobs.records[0].ended_by = "dropped: not needed" if dropped else "m-0000000000ff"
        await state(store, SuspensionState.OVER)
        give_room(pilots)

        async def calm() -> bool:
            return not any("low" in about for about in (await store.load()).alerts)

        await until("no alert", calm)
        (one,) = await store.suspensions()
    assert one.result == ("dropped: not needed" if dropped else "resumed by others (m-0000000000ff)")
    assert "before resuming" not in jobs.reached


async def test_failed_resumption_is_recorded_and_repeated(pilots: PilotCluster, jobs: FakeJobs) -> None:
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        await moved(pilots)
        jobs.fails = "its keeper has ended"
        give_room(pilots)

        async def repeated() -> bool:
            return jobs.reached.count("before resuming") >= 3

        await until("attempts", repeated)
        jobs.fails = ""
        await state(store, SuspensionState.RESUMED)
        texts = [one.text for one in await store.events() if one.kind == "suspension"]
        (one,) = await store.suspensions()
    assert "job 0/low: still suspended, not resumed: its keeper has ended" in texts
    assert one.failures >= 3


async def test_refused_suspension_leaves_the_job_and_is_given_up(pilots: PilotCluster, jobs: FakeJobs) -> None:
    jobs.fails = "a node does not answer"
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        assert await alerts(store, "low: 3 attempts have failed")
        await state(store, SuspensionState.NOT_SUSPENDED, 3)
    assert pilots.places() == {GPT: "node-1", LOW: "spare-1"}


async def test_job_that_was_started_again_under_its_name_is_not_suspended(pilots: PilotCluster, jobs: FakeJobs) -> None:
    """It is not the one that the policy was asked about, and its nodes are not those where it would be looked for."""
    jobs.restarts = True
    async with running(pilots) as store:
        pilots["node-1"].raise_alarm()
        assert await alerts(store, "low: 3 attempts have failed")
        await state(store, SuspensionState.NOT_SUSPENDED, 3)
        tried = await store.suspensions()
    assert all("job low is not the one that was meant" in one.result for one in tried)
    assert [one.place for one in pilots["spare-1"].ranks if one.job == "low"] == [pb.Rank.HERE]
    assert not pilots["spare-1"].called("Begin", "Freeze")


def test_verb_without_an_autopilot_suspends_nothing(
    pilots: PilotCluster, jobs: FakeJobs, migrator: Migrator, tmp_path: Path
) -> None:
    """It could not resume the job later."""
    file = tmp_path / "policy.toml"
    file.write_text('[spares]\npreempt = "suspend"\n[[jobs]]\njob = "gpt"\npriority = 10\n')
    ran = migrator("drain", "node-1", "--policy", str(file), "--json")
    assert "rank 3 of gpt stays" in ran.json["summary"]
    assert jobs.reached == []


def test_report_says_how_long_jobs_were_suspended(pilots: PilotCluster, jobs: FakeJobs, migrator: Migrator) -> None:
    async def suspended() -> None:
        async with running(pilots):
            pilots["node-1"].raise_alarm()
            await moved(pilots)

    asyncio.run(suspended())
    shown: Any = migrator("report").out
    assert "time lost by suspended jobs" in shown
    assert "(1 suspension)" in shown
    assert "suspended to make room for rank 3 of gpt (priority 10 > 0)" in shown
