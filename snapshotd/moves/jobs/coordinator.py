"""Keeps the records of suspensions and resumptions of jobs, each with one write-once outcome, and carries them out.

Invariant: COMMIT is recorded only if every participant has answered, to this daemon itself, that it is ready. A suspension
has at most one resumption that is not aborted. The images are dropped once every target has answered that its copy ran.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, NotFound, SnapshotError, Undone, Unreachable, Usage, Where, WrongState
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import JobDecision, Part
from snapshotd.moves.jobs import dropping
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import JobPart
from snapshotd.moves.rules import CopyState, Mark, Outcome
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

ASK_S = 10.0
#: When an operator who drops a job gets an answer at the latest. It takes seconds to remove a large image.
ANSWER_S = 30.0
AGAIN_S = 1.0
MAX_RANKS = 1 << 16
#: How long a resumption that is committed has at least to be carried out before an operator may drop its images.
SETTLES_S = 60.0


class NotDropped(Unreachable):
    """Not every node has confirmed that it has dropped its images."""

    def __init__(self, left: list[str]) -> None:
        super().__init__(f"these images are not dropped yet: {'; '.join(left[:5])}", where=Where.UNKNOWN)
        self.left = left


class JobSteps(Steps):
    """One instance per daemon."""

    role = "job"
    not_here = "this node has no job record {move}"

    def __init__(self, node: Node) -> None:
        super().__init__(node.journal)
        self.node = node
        self._deciding = asyncio.Lock()  # of two resumptions of one job, at most one begins, and at most one commits

    # ------------------------------------------------------------------ the driver's steps

    @step
    async def begin(self, request: pb.BeginJobRequest) -> pb.BeginJobReply:
        """Journals a suspension or a resumption and starts the driver's lease. Nothing is paused or restored yet."""
        check_move_id(request.record)
        if self.journal.find(request.record) is not None:
            known = self.moving(request.record)
            self.must_be_open(known)
            known.renew()
            return pb.BeginJobReply()
        if not 1 <= request.lease_s <= 3600 or not 0 < len(request.participants) <= MAX_RANKS:
            raise Usage("a job record begins with participants and a lease of 1 to 3600 s")
        parts = [JobPart.of(one) for one in request.participants]
        for part in parts:
            check_move_id(part.move)
        await reach(Point.BEFORE_JOB_BEGIN)
        here = (self.node.config.node, self.node.config.advertise)
        begin = Begin(
            *(request.record, "job", "", request.job, 0, *here, *here, "00" * 32, host.boot_id(), time.time()),
            lease_s=request.lease_s,
            user_id=request.user_id,
        )
        async with self._deciding:
            await in_thread(self._must_be_possible, request, parts)
            move_log = await in_thread(self.journal.begin, begin)
            await in_thread(move_log.mark, Mark.BEGUN, participants=parts, suspension=request.suspension)
            self._track(move_log)
        await reach(Point.JOB_BEGIN)
        return pb.BeginJobReply()

    def _must_be_possible(self, request: pb.BeginJobRequest, parts: Iterable[JobPart]) -> None:
        """Raises unless the job may be suspended, or resumed, now."""
        for moving in list(self.moves.values()):
            if moving.log.outcome is None and moving.log.begin.is_of_job(request.user_id, request.job):
                raise Busy(f"job {request.job} is being suspended or resumed already ({moving.log.move})")
        if not request.suspension:
            return
        suspension = self.journal.find(check_move_id(request.suspension))
        if suspension is None or suspension.begin.role != "job" or not suspension.committed:
            raise NotFound(f"job {request.job} is not suspended", remedy="`migrator job list` shows suspended jobs")
        record = suspension.whole()
        if ended := ended_by(self.journal, suspension):
            raise WrongState(
                f"the suspension of job {request.job} has ended ({ended})",
                remedy="`migrator ps` shows where its ranks are",
                where=Where.UNKNOWN,
            )
        if sorted(part.image for part in parts) != sorted(part.move for part in record.participants):
            raise Usage("a job is resumed with all ranks with which it was suspended, and no others")

    async def renew(self, record: str) -> pb.RenewReply:
        moving = self.moving(record)
        moving.renew()
        return pb.RenewReply(lease_left_s=moving.log.begin.lease_s)

    @step
    async def commit(self, record: str) -> pb.Outcome:
        """The point of no return: records COMMIT if every participant answers that it is ready. Raises Undone otherwise."""
        moving = self.moving(record)
        async with self.ending(moving, "commit"):
            if moving.log.outcome is None:
                await reach(Point.BEFORE_JOB_COMMIT)
                parts = await self._ask_all(moving.log)
                ready, why = job_rules.may_commit(parts)
                if not ready:
                    raise Undone(
                        f"not every rank is ready: {why}",
                        remedy="a retry is safe; see the daemon's log on the node that is not ready",
                        where=Where.UNKNOWN,
                    )
                if moving.lease_expired:
                    await self.settle_once(moving)
                else:
                    await self._record_commit(moving.log)
                await reach(Point.JOB_COMMIT)
            moving.wake()
            return self._outcome_of(moving.log)

    async def _record_commit(self, move_log: MoveLog) -> None:
        """Records COMMIT. That of a resumption only if the job is still suspended: it was neither resumed nor dropped."""
        async with self._deciding:
            if suspension := move_log.record.suspension:
                ended = await in_thread(ended_by, self.journal, self.journal.get(suspension))
                if ended:
                    raise Undone(f"the suspension has ended ({ended})", where=Where.UNKNOWN)
            await in_thread(move_log.decide, Outcome.COMMIT, "every rank is ready", "driver")

    @step
    async def abort(self, record: str, reason: str, by: str) -> pb.Outcome:
        """Ends a record that has no outcome. Returns the outcome that stands."""
        if self.journal.find(check_move_id(record)) is None:
            await in_thread(self._refuse_permanently, record, reason)
        moving = self.moving(record)
        async with self.ending(moving, "abort"):
            await reach(Point.BEFORE_JOB_ABORT)
            await in_thread(moving.log.decide, Outcome.ABORT, reason, by)
            moving.wake()
            return self._outcome_of(moving.log)

    def _refuse_permanently(self, record: str, reason: str) -> None:
        """Journals the abort of a record that never began here, so that a Begin that was only delayed is refused."""
        here = (self.node.config.node, self.node.config.advertise)
        move_log = self.journal.begin(
            Begin(record, "job", "", "", 0, *here, *here, "00" * 32, host.boot_id(), time.time())
        )
        move_log.decide(Outcome.ABORT, reason, "coordinator")
        move_log.mark(Mark.SETTLED)
        move_log.fold()

    @step
    async def drop(self, record: str, reason: str) -> pb.DropImageReply:
        """An operator gives a suspended job up: its images are dropped, and it can never be resumed. Idempotent. Nodes that
        do not answer now are asked again until they have confirmed it."""
        moving = self.moving(record)
        if moving.log.last_mark is Mark.SETTLED and moving.settling is not None:
            moving.wake()
            await asyncio.wait([moving.settling])  # the loop that carried out the suspension is about to end
        async with self.ending(moving, "drop"):
            async with self._deciding:
                if await in_thread(self._may_drop, moving.log):
                    # Not SETTLED: the settle loop, also of a restarted daemon, goes on until all nodes have confirmed it.
                    await in_thread(moving.log.mark, Mark.BEGUN, dropped=reason)
            if moving.log.last_mark is not Mark.SETTLED and record not in self.moves:
                self._follow_record(moving)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self.settle_once(moving)
            except NotDropped as error:
                moving.waiting_for = error.message
                return pb.DropImageReply(waiting_for=error.left)
            except TimeoutError:
                return pb.DropImageReply(waiting_for=["large images: their nodes are still at work"])
            return pb.DropImageReply()

    def _may_drop(self, suspension: MoveLog) -> bool:
        """Whether a suspension is to be marked as dropped; not if it is already. Raises unless it may be. Blocking."""
        known, job = suspension.whole(), suspension.begin.job
        if known.dropped:
            return False
        if known.suspension or not suspension.committed:
            raise WrongState(f"{suspension.move} is not a suspended job", where=Where.UNKNOWN)
        for other in self.journal.all():
            if other.begin.role != self.role or other.whole().suspension != suspension.move:
                continue
            if other.outcome is None:
                raise Busy(f"job {job} is being resumed ({other.move})")
            if other.committed and other.last_mark is Mark.SETTLED:
                raise WrongState(f"job {job} was resumed ({other.move})", where=Where.UNKNOWN)
            if other.committed and other.outcome.unix_s > time.time() - SETTLES_S:
                raise Busy(
                    f"job {job} is being resumed ({other.move})",
                    remedy=f"if it still is after {SETTLES_S:.0f} s, its images can be dropped although it runs",
                )
        return True

    async def outcome(self, record: str) -> pb.Outcome:
        return self._outcome_of(self.moving(record).log)

    async def listed(self) -> pb.ListJobsReply:
        return pb.ListJobsReply(jobs=await in_thread(self._listed))

    def _listed(self) -> list[pb.JobRecord]:
        found = []
        for move_log in self.journal.all():
            begin, decided = move_log.begin, move_log.outcome
            if begin.role != self.role or not begin.job:
                continue
            record = move_log.whole()
            moving = self.moves.get(move_log.move)
            by = ended_by(self.journal, move_log)
            is_over = bool(move_log.ended_unix_s) and (bool(record.suspension) or bool(by) or not move_log.committed)
            found.append(
                pb.JobRecord(
                    record=move_log.move,
                    job=begin.job,
                    user_id=begin.user_id,
                    suspension=record.suspension,
                    ranks=len(record.participants),
                    # A history of large jobs would not fit into a message.
                    participants=[] if is_over else [part.to_proto() for part in record.participants],
                    outcome=pb.OutcomeKind.Value(decided.outcome.value) if decided is not None else pb.UNDECIDED,
                    reason=decided.reason if decided is not None else "",
                    decided_by=decided.decided_by if decided is not None else "",
                    begun_unix_s=begin.begun_unix_s,
                    ended_unix_s=move_log.ended_unix_s,
                    waiting_for=moving.waiting_for if moving is not None else "",
                    ended_by=by,
                )
            )
        return found

    # ------------------------------------------------------------------ without a driver

    def adopt_journal(self) -> None:
        """At start: takes up every record from before the restart that is not carried out."""
        for move_log in self.journal.all():
            if move_log.begin.role == self.role and move_log.last_mark is not Mark.SETTLED:
                if move_log.known.mark is None:  # a crash before the participants were journalled, so none was asked
                    move_log.decide(Outcome.ABORT, "it never began", "coordinator")
                    move_log.mark(Mark.SETTLED)
                    move_log.fold()
                else:
                    log.info("taking up job record %s from before the restart", move_log.move)
                    self._track(move_log)

    def _track(self, move_log: MoveLog) -> None:
        self._follow_record(Moving(move_log))

    def _follow_record(self, moving: Moving) -> None:
        self.moves[moving.log.move] = moving
        moving.renew()
        self.follow(moving, settle_loop(moving, self.settle_once, AGAIN_S, AGAIN_S, "coordinator"))

    async def settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules. The caller holds the record's lock."""
        move_log, parts = moving.log, dict[str, Part]()
        given_up = await in_thread(self._is_given_up, move_log)
        for _ in range(3):
            decision, moving.waiting_for = job_rules.job_next(
                move_log.last_mark,
                move_log.outcome.outcome if move_log.outcome is not None else None,
                parts.values(),
                lease_expired=moving.lease_expired,
                given_up=given_up,
            )
            match decision:
                case JobDecision.RECORD_ABORT:
                    await in_thread(move_log.decide, Outcome.ABORT, moving.waiting_for, "coordinator")
                case JobDecision.ASK:
                    if parts:
                        late = [f"{name} {part}" for name, part in parts.items() if part is not Part.DONE]
                        moving.waiting_for += f": {'; '.join(late[:5])}"
                        return
                    parts = await self._ask_all(move_log)
                case JobDecision.CLOSE:
                    if move_log.last_mark is not Mark.SETTLED:
                        await self._close(move_log, given_up=given_up)
                    return
                case _:
                    return

    def _is_given_up(self, move_log: MoveLog) -> bool:
        """Whether an operator has dropped the images of this record's suspension. Blocking."""
        record = move_log.whole()
        suspension = self.journal.find(record.suspension) if record.suspension else None
        return bool(record.dropped or (suspension is not None and suspension.whole().dropped))

    async def _close(self, move_log: MoveLog, *, given_up: bool) -> None:
        """All have carried it out, or the job is given up. The images of a job that was resumed or given up are dropped
        first: they are of no use any more. Raises NotDropped."""
        record = await in_thread(move_log.whole)
        if move_log.committed and (record.suspension or given_up):
            resumed = bool(record.suspension) or await in_thread(resumed_by, self.journal, move_log) is not None
            images, reason = dropping.images_of(record), record.dropped or move_log.move
            if left := await dropping.drop(self.node, images, reason, given_up=not resumed):
                raise NotDropped(left)
        await in_thread(move_log.mark, Mark.SETTLED)

    async def _ask_all(self, move_log: MoveLog) -> dict[str, Part]:
        """The answers of all participants, by a name for display. What a participant has carried out is journalled, and it is
        not asked again: it may forget its part then."""
        record = await in_thread(move_log.whole)
        ask = self._ask_target if record.suspension else self._ask_store
        known = set(record.done) if move_log.committed else set()

        async def answer(part: JobPart) -> Part:
            return Part.DONE if part.move in known else await ask(part)

        answers = await asyncio.gather(*map(answer, record.participants))
        parts = list(zip(record.participants, answers, strict=True))
        done = [part.move for part, said in parts if said in job_rules.CARRIED_OUT]
        if move_log.committed and set(done) > known:
            await in_thread(move_log.mark, move_log.last_mark, done=done)
        return {f"rank {part.rank} on {part.node}": said for part, said in parts}

    async def _ask_store(self, part: JobPart) -> Part:
        try:
            async with self.node.client(part.node, part.endpoint) as client:
                found = await client.source.GetOutcome(pb.MoveRequest(move=part.move), timeout_s=ASK_S)
        except NotFound:
            return Part.ABSENT
        except SnapshotError:
            return Part.UNREACHABLE
        if found.settled:
            return Part.DONE
        return Part.READY if found.stored else Part.WORKING

    async def _ask_target(self, part: JobPart) -> Part:
        try:
            async with self.node.client(part.node, part.endpoint) as client:
                found = await client.target.GetCopy(pb.MoveRequest(move=part.move), timeout_s=ASK_S)
        except SnapshotError:
            return Part.UNREACHABLE
        return job_rules.target_part(CopyState[pb.Copy.State.Name(found.state)])

    def _outcome_of(self, move_log: MoveLog) -> pb.Outcome:
        decided = move_log.outcome
        if decided is None:
            return pb.Outcome(kind=pb.UNDECIDED)
        return pb.Outcome(
            kind=pb.OutcomeKind.Value(decided.outcome.value),
            reason=decided.reason,
            decided_by=decided.decided_by,
            settled=move_log.last_mark is Mark.SETTLED,
        )


def resumed_by(journal: Journal, suspension: MoveLog) -> MoveLog | None:
    """The record that resumed a suspended job. Blocking."""
    for other in journal.all():
        if other.begin.role == "job" and other.committed and other.whole().suspension == suspension.move:
            return other
    return None


def ended_by(journal: Journal, suspension: MoveLog) -> str:
    """The record that resumed a suspended job, or why an operator gave it up; empty while it is suspended. Blocking."""
    if dropped := suspension.whole().dropped:
        return f"dropped: {dropped}"
    by = resumed_by(journal, suspension)
    return by.move if by is not None else ""


def is_needed(journal: Journal, move_log: MoveLog) -> bool:
    """Whether a record must stay: of a job that is suspended, or the proof that it was resumed. Blocking."""
    if not move_log.committed:
        return False
    if suspension := move_log.whole().suspension:
        return journal.find(suspension) is not None
    return not ended_by(journal, move_log)
