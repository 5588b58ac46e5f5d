"""Executes the steps of a table in order, renews the leases, and ends an attempt that failed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from migrator import asked_rank
from migrator.cluster import Cluster
from migrator.driver.reporter import Reporter
from migrator.job_protocol import JobStep, JobVerdict, index_of, undo_plan
from migrator.job_results import ChangedFile, JobOptions, JobResult, RankPlace, UnreadableImage, UnsentImage
from migrator.results import Event, PhaseTime
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import OutcomeUnknown, RankGone, Refused, SnapshotError, Timeout, Undone, Where

T = TypeVar("T")

#: How long to keep asking a coordinator that cannot be reached for its record.
REACH_S = 60.0


class JobRun(ABC):
    """One suspension or resumption in progress: its participants, what they answered, where the time went."""

    table: tuple[JobStep, ...]
    undo: tuple[JobStep, ...]
    success: JobVerdict
    #: What the job is doing after a refusal or an undo.
    untouched: str
    takes_snapshot = False

    def __init__(
        self, cluster: Cluster, options: JobOptions, job: str, user_id: int, on_event: Callable[[Event], None]
    ) -> None:
        self.cluster, self.options, self.job, self.user_id = cluster, options, job, user_id
        self.reporter = Reporter(on_event)
        self.record = options.record or new_id()
        self.coordinator = ""  # node
        self.participants: list[pb.Participant] = []
        self.nodes: list[pb.NodeAddresses] = []
        self.witnesses: list[str] = []  # of a snapshot: nodes that keep none of it, and have a vote
        self.unsigned_on: list[str] = []  # … nodes whose copies will be refused at a rollback: they keep no signatures
        self.stand_ins: list[str] = []  # nodes that may be witnesses instead
        self.asked_copies = 0  # of a snapshot: how many of each image the job is to have; 0: as the cluster file says
        self.nccl = False  # ranks are in NCCL communicators
        self.pause_s = 0.0  # of a snapshot: from the cut until all ranks went on
        self.reached = 0
        self.undoing = False
        self.began = time.monotonic()
        self.bytes: dict[str, tuple[int, int, int]] = {}  # by move: sent, found on the target, expected
        self.parts: dict[str, PhaseTime] = {}  # by name
        self.warnings: list[str] = []
        self.changed_files: list[ChangedFile] = []  # after a rollback
        self.unreadable: list[UnreadableImage] = []  # a resumption does without them
        self.unsent: list[UnsentImage] = []  # … and uses others first
        self.unconfirmed: list[str] = []  # ranks whose nodes have not confirmed the undo, and why
        self._clients: dict[str, DaemonClient] = {}
        self._opened = contextlib.AsyncExitStack()

    @property
    @abstractmethod
    def steps(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        """A function for every call of the table, and of its undo except Job.Abort."""

    @abstractmethod
    def places(self) -> list[RankPlace]: ...

    @property
    def commit(self) -> int:
        return index_of("Job.Commit", self.table)

    @property
    def first_change(self) -> int:
        return index_of("Job.Begin", self.table)

    @property
    def coordinates(self) -> pb.Coordinator:
        return pb.Coordinator(record=self.record, node=self.coordinator, endpoint=self.cluster.nodes[self.coordinator])

    async def client(self, node: str) -> DaemonClient:
        """A connection to a daemon, kept until the end: a large job has many ranks on few nodes."""
        if node not in self._clients:
            self._clients[node] = await self._opened.enter_async_context(self.cluster.client(node))
        return self._clients[node]

    async def close(self) -> None:
        await self._opened.aclose()

    async def begin_job(self, timeout_s: float) -> None:
        request = pb.BeginJobRequest(
            record=self.record,
            job=self.job,
            user_id=self.user_id,
            suspension=self.suspension,
            participants=self.participants,
            lease_s=self.options.lease_s,
            snapshot=self.takes_snapshot,
            nccl=self.nccl,
            nodes=self.nodes if self.takes_snapshot else (),
            witnesses=self.witnesses,
            stand_ins=self.stand_ins,
            copies=self.asked_copies,
        )
        reply = await (await self.client(self.coordinator)).job.Begin(request, timeout_s=timeout_s)
        self.warnings += [
            f"{self.coordinator} cannot ask {why}, so too few nodes have a vote on job {self.job}, and it may wait for an"
            " operator when a node is lost. Have snapshotd run there with the same version, see that"
            f" {self.coordinator} reaches it, then take another snapshot"
            for why in reply.not_asked
        ]

    @property
    def suspension(self) -> str:
        return ""

    async def commit_job(self, timeout_s: float) -> None:
        request = pb.MoveRequest(move=self.record)
        outcome = await (await self.client(self.coordinator)).job.Commit(request, timeout_s=timeout_s)
        if outcome.kind != pb.COMMIT:
            raise Undone(f"the coordinator decided otherwise: {outcome.reason}", where=Where.UNKNOWN)

    async def attach(self, timeout_s: float) -> None:
        request = pb.MoveRequest(move=self.record)
        reply = await (await self.client(self.coordinator)).job.Attach(request, timeout_s=timeout_s)
        if reply.abandoned:
            raise RankGone(f"communicators are never built again: {reply.abandoned}", where=Where.UNKNOWN)

    def must_be(self, part: pb.Participant, node: str, reported: pb.Rank) -> None:
        """Raises Refused unless what `node` reports is the rank that it was asked about."""
        asked = pb.Rank(uid=part.rank_uid, rank=part.rank, job=self.job, user_id=self.user_id)
        asked_rank.must_be(reported, asked, node)

    async def each_confirms(self, ask: Callable[[pb.Participant], Awaitable[None]]) -> None:
        """Asks all participants at once to undo their part. A daemon that does not answer now asks the coordinator later, so
        a failure is only remembered."""

        async def confirm(part: pb.Participant) -> None:
            try:
                await ask(part)
            except SnapshotError as error:
                self.unconfirmed.append(f"rank {part.rank}: not confirmed by {part.node}: {error.headline}")

        await each(self.participants, confirm)

    async def renew(self) -> None:
        """Renews the coordinator's lease, and those of the participants, until it is cancelled."""
        every_s = self.options.lease_s / 4
        while True:
            await asyncio.sleep(every_s)
            with contextlib.suppress(SnapshotError):
                client = await self.client(self.coordinator)
                await client.job.Renew(pb.MoveRequest(move=self.record), timeout_s=every_s)
            await self.renew_parts(every_s)

    async def renew_parts(self, timeout_s: float) -> None:
        """Renews the leases of the participants, if they count any."""
        return

    def sent(self, phase: str, move: str, progress: pb.Progress) -> None:
        self.bytes[move] = (progress.bytes_sent, progress.bytes_found, progress.bytes_expected)
        sent, found, expected = (sum(column) for column in zip(*self.bytes.values(), strict=True))
        self.reporter.sent(phase, sent + found, expected)

    @property
    def copied_bytes(self) -> int:
        """Of a snapshot: sent to the nodes that keep copies."""
        return 0

    def add_parts(self, parts: Iterable[pb.Part]) -> None:
        """Of one rank. The ranks work at the same time, so the longest counts."""
        for part in parts:
            known = self.parts.setdefault(part.name, PhaseTime(part.name, 0.0, 0))
            known.seconds, known.bytes = max(known.seconds, part.seconds), known.bytes + part.bytes

    def refuse_if(self, checks: Iterable[tuple[str, pb.Check]]) -> None:
        """Raises Refused with all refusals; collects warnings. Each check comes with the name of its rank."""
        refused = []
        for name, one in checks:
            if one.verdict == pb.Check.REFUSE:
                refused.append(f"  {name}: {one.name}: {one.reason}\n    remedy: {one.remedy}")
            elif one.verdict == pb.Check.WARN:
                self.warnings.append(f"{name}: {one.name}: {one.reason}")
        if refused:
            raise Refused(f"job {self.job} is refused:\n" + "\n".join(refused), where=Where.UNTOUCHED)


def new_id() -> str:
    return f"m-{secrets.token_hex(6)}"


async def each(items: Sequence[T], ask: Callable[[T], Awaitable[None]]) -> None:
    """Asks all at once. The first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(_run(ask(item)))
    except ExceptionGroup as failures:
        flat: list[Exception] = list(failures.exceptions)
        raise next((error for error in flat if isinstance(error, SnapshotError)), flat[0]) from failures


async def _run(asked: Awaitable[None]) -> None:
    await asked


async def drive(run: JobRun) -> JobResult:
    """Goes through the table, and reports how it ended."""
    work = asyncio.create_task(_drive(run))
    while True:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise
            if work.done():
                continue  # it has ended in the same moment, and its result counts
            if run.reached < run.commit:
                work.cancel()
            else:
                run.reporter.note("its outcome may be recorded already: finishing it, or undoing it if it is not")


async def _drive(run: JobRun) -> JobResult:
    renewing: asyncio.Task[None] | None = None
    try:
        for index, step in enumerate(run.table):
            run.reached = index
            if step.only_with_nccl and not run.nccl:
                continue
            await _perform(run, step)
            if step.call == "Job.Begin":
                renewing = asyncio.create_task(run.renew())
        return _result(run, run.success, "", "", None)
    except (SnapshotError, asyncio.CancelledError) as error:
        failure = error if isinstance(error, SnapshotError) else Undone("interrupted", where=Where.UNKNOWN)
        if run.reached < run.first_change:
            if isinstance(failure, Refused):
                return _result(run, JobVerdict.REFUSED, failure.message, run.untouched, failure)
            raise
        return await _end(run, failure)
    finally:
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        await run.close()


async def _perform(run: JobRun, step: JobStep) -> None:
    with run.reporter.phase(step.phase, step.call):
        await run.steps[step.call](_time_left(run, step))


def _time_left(run: JobRun, step: JobStep) -> float:
    """The step's own time-out, or what is left of --timeout, which counts up to COMMIT."""
    limit_s = run.options.timeout_s
    if limit_s is None or run.reached > run.commit:
        return step.timeout_s
    left_s = min(step.timeout_s, limit_s - (time.monotonic() - run.began))
    if left_s <= 0:
        raise Timeout(f"--timeout {limit_s:.0f} s expired before {step.phase}")
    return left_s


async def _end(run: JobRun, error: SnapshotError) -> JobResult:
    """The result of an attempt whose step `run.reached` failed: undone, or finished if COMMIT turns out to be recorded."""
    outcome: pb.Outcome | None = pb.Outcome(kind=pb.COMMIT)
    if run.reached <= run.commit:
        with run.reporter.phase("undo", "Job.Abort"):
            outcome = await _abort(run, error.headline[:500])
    if outcome is None:
        unknown = OutcomeUnknown(
            f"the coordinator on {run.coordinator} does not answer; its record decides (first failure: {error.message})",
            remedy=f"start snapshotd on {run.coordinator}; then `migrator job list` shows the outcome",
            where=Where.UNKNOWN,
        )
        return _result(run, JobVerdict.UNKNOWN, unknown.message, "unknown", unknown)
    if outcome.kind == pb.ABORT:
        run.undoing = True
        for step in undo_plan(run.table, run.undo, run.reached):
            if step.call != "Job.Abort" and (run.nccl or not step.only_with_nccl):
                with run.reporter.phase(step.phase, step.call):
                    await run.steps[step.call](step.timeout_s)
        return _result(run, JobVerdict.UNDONE, error.message, _after_undo(run), error)
    return await _finish(run, error)


def _after_undo(run: JobRun) -> str:
    """What the job is doing after an undo, as far as its nodes have confirmed it."""
    if not run.unconfirmed:
        return run.untouched
    left = "; ".join(run.unconfirmed[:5])
    return f"{run.untouched}, except ({left}). These nodes ask the coordinator by themselves: see `migrator job list`"


async def _finish(run: JobRun, error: SnapshotError) -> JobResult:
    """COMMIT is recorded, and the daemons carry it out. Asks them until all have confirmed it, or for too long."""
    ends = time.monotonic() + run.options.confirm_s
    while True:
        try:
            for step in run.table[run.commit + 1 :]:
                await _perform(run, step)
            return _result(run, run.success, "", "", None)
        except SnapshotError as again:
            error = again
        if (standing := await _standing(run)) is not None and standing.kind == pb.ABORT:
            return _result(run, JobVerdict.UNDONE, standing.reason, run.untouched, error)  # it was taken back
        if time.monotonic() > ends:
            unknown = OutcomeUnknown(
                f"committed, but not every node has confirmed it: {error.message}",
                remedy="the daemons carry it out when they can; `migrator job list` and `migrator ps` show it",
                where=Where.UNKNOWN,
            )
            return _result(run, JobVerdict.UNKNOWN, unknown.message, "committed, not confirmed", unknown)
        await asyncio.sleep(1.0)


async def _standing(run: JobRun) -> pb.Outcome | None:
    """The outcome that stands, or None if the coordinator does not answer now."""
    with contextlib.suppress(SnapshotError):
        client = await run.client(run.coordinator)
        return await client.job.GetOutcome(pb.MoveRequest(move=run.record), timeout_s=5)
    return None


async def _abort(run: JobRun, reason: str) -> pb.Outcome | None:
    request = pb.AbortRequest(move=run.record, reason=reason)
    with contextlib.suppress(SnapshotError):
        return await (await run.client(run.coordinator)).job.Abort(request, timeout_s=REACH_S, retry=True)
    return None


def _result(run: JobRun, verdict: JobVerdict, reason: str, state: str, error: SnapshotError | None) -> JobResult:
    exit_code = 0 if error is None else Undone.exit_code if verdict is JobVerdict.UNDONE else error.exit_code
    return JobResult(
        record=run.record,
        job=run.job,
        user_id=run.user_id,
        coordinator=run.coordinator,
        outcome=verdict,
        ranks=run.places(),
        seconds=time.monotonic() - run.began,
        pause_s=run.pause_s,
        bytes=sum(sent for sent, _, _ in run.bytes.values()),
        copied_bytes=run.copied_bytes,
        found_bytes=sum(found for _, found, _ in run.bytes.values()),
        phases=run.reporter.phases,
        parts=list(run.parts.values()),
        reason=reason,
        state=state or verdict.value,
        error_code=error.code if error is not None else "",
        remedy=error.advice if error is not None else "",
        exit_code=exit_code,
        warnings=run.warnings,
        changed_files=sorted(run.changed_files, key=lambda one: (one.rank, one.path)),
        unreadable_images=sorted(run.unreadable, key=lambda one: (one.rank, one.node)),
        unsigned_on=run.unsigned_on,
        unsent_images=sorted(run.unsent, key=lambda one: (one.rank, one.node)),
    )
