"""Keeps the records of suspensions and resumptions of jobs, each with one write-once outcome, and carries them out.

Invariant: COMMIT is recorded only if every participant has answered, to this daemon itself, that it is ready. A suspension
has at most one resumption that is not aborted. The images are dropped once every target has answered that its copy ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Refused, SnapshotError, Undone, Usage, Where
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import JobDecision, Part
from snapshotd.moves.jobs import admission, dropping, listing, participants, records, snapshots
from snapshotd.moves.jobs.communicators import JobCommunicators
from snapshotd.moves.jobs.lease import Leases, keepers_of
from snapshotd.moves.jobs.promises import Promises
from snapshotd.moves.jobs.rollback import Rollbacks
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin, Fields
from snapshotd.moves.record_parts import ClusterNode, JobPart
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

ASK_S = 10.0
#: When an operator who drops a job gets an answer at the latest. It takes seconds to remove a large image.
ANSWER_S = 30.0
END_S = 60.0
AGAIN_S = 1.0
MAX_RANKS = 1 << 16


class JobSteps(Steps):
    """One instance per daemon."""

    role = "job"
    not_here = "this node has no job record {move}"

    def __init__(self, node: Node, communicators: JobCommunicators) -> None:
        super().__init__(node.journal)
        self.node, self.communicators = node, communicators
        self.promises = Promises(node)
        self.leases = Leases(node, self.promises)
        self.rollbacks = Rollbacks(node, self.moves, self.leases)
        self.deciding = asyncio.Lock()  # of two resumptions of one job, at most one begins, and at most one commits

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
        if request.snapshot and not self.node.config.job_snapshots:
            raise Refused(
                f"snapshots of running jobs are switched off on {self.node.config.node}, which would coordinate them",
                remedy="snapshots take memory of the job's nodes; if that is wanted, remove `job_snapshots = false` from"
                " snapshotd.toml of that node and restart snapshotd there",
                where=Where.UNTOUCHED,
            )
        parts = [JobPart.of(one) for one in request.participants]
        for part in parts:
            check_move_id(part.move)
            places = [node for _, node, _ in records.images_of(part)]
            if request.snapshot and (len(places) < 2 or len(set(places)) < len(places)):
                raise Usage("every rank of a snapshot has buddies, each on a node of its own")
            for copy in part.copies:
                check_move_id(copy.move)
        await reach(Point.BEFORE_JOB_BEGIN)
        here = (self.node.config.node, self.node.config.advertise)
        begin = Begin(
            *(request.record, "job", "", request.job, 0, *here, *here, "00" * 32, host.boot_id(), time.time()),
            lease_s=request.lease_s,
            user_id=request.user_id,
            kind="snapshot" if request.snapshot else "",
        )
        nodes = [ClusterNode.of(node) for node in request.nodes]
        voters: list[str] = []
        not_asked: list[str] = []
        if request.snapshot:
            voters, not_asked = await self.leases.voters(request, keepers_of(self.node.config.node, parts))
        async with self.deciding:
            await in_thread(admission.must_be_possible, self.journal, list(self.moves.values()), request, parts)
            await self.leases.must_hold({part.rank_uid for part in parts})
            move_log = await in_thread(self.journal.begin, begin)
            self.leases.begins(move_log.move)
            fields = Fields(participants=parts, suspension=request.suspension, gated=request.nccl, nodes=nodes)
            fields["quorums"], fields["asked_copies"] = [voters] if voters else [], request.copies
            await in_thread(move_log.mark, Mark.BEGUN, **fields)
            self._track(move_log)
        await reach(Point.JOB_BEGIN)
        return pb.BeginJobReply(not_asked=not_asked)

    async def renew(self, record: str) -> pb.RenewReply:
        moving = self.moving(record)
        moving.renew()
        return pb.RenewReply(lease_left_s=moving.log.begin.lease_s)

    @step
    async def detach(self, record: str) -> pb.DetachReply:
        """Takes all communicators of the job down. Its gates are closed. If it fails some are down, and the driver aborts."""
        async with self.working_on(record, "detach") as moving:
            return await self.communicators.detach(moving)

    @step
    async def attach(self, record: str) -> pb.AttachReply:
        """Builds the communicators again, also as part of an undo: then all ranks have been thawed."""
        moving = self.moving(record)
        async with self.ending(moving, "reattach"):
            return await self.communicators.attach(moving)

    @step
    async def commit(self, record: str) -> pb.Outcome:
        """The point of no return: records COMMIT if every participant answers that it is ready. Raises Undone otherwise."""
        moving = self.moving(record)
        async with self.ending(moving, "commit"):
            if moving.log.outcome is None:
                await reach(Point.BEFORE_JOB_COMMIT)
                parts = await participants.ask_all(self.node, moving.log)
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
            return listing.outcome_of(self.journal, moving.log)

    async def _record_commit(self, move_log: MoveLog) -> None:
        """Records COMMIT. That of a resumption only if the job is still suspended: it was neither resumed nor dropped. That
        of a suspension or a snapshot only if the job was not rolled back meanwhile: what it has stored is of an incarnation
        that is over."""
        async with self.deciding:
            await self.leases.must_hold(await in_thread(records.uids, move_log))
            if suspension := move_log.record.suspension:
                ended = await in_thread(records.ended_by, self.journal, self.journal.get(suspension))
                if ended:
                    raise Undone(f"the suspension has ended ({ended})", where=Where.UNKNOWN)
            elif before := await in_thread(records.rolled_back, self.journal, records.uids(move_log)):
                raise Undone(f"the job was rolled back meanwhile ({before.move})", where=Where.SUSPENDED)
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
            return listing.outcome_of(self.journal, moving.log)

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
    async def drop(self, record: str, reason: str, lost_nodes: Sequence[str] = ()) -> pb.DropImageReply:
        """An operator gives a suspended job up, or one that was rolled back: its images are dropped, and it can never be
        resumed. Idempotent. Nodes that do not answer now are asked again until they have confirmed it, except `lost_nodes`.
        A snapshot is dropped if no other node knows a rank of its job any more."""
        moving = self.moving(record)
        if moving.log.begin.kind == "snapshot":
            async with self.deciding:
                await snapshots.must_have_ended(self.node, moving.log, lost_nodes)
                await self.give_up(moving.log, reason)
            return pb.DropImageReply()
        if moving.log.last_mark is Mark.SETTLED and moving.settling is not None:
            moving.wake()
            await asyncio.wait([moving.settling])  # the loop that carried out the suspension is about to end
        async with self.ending(moving, "drop"):
            async with self.deciding:
                if await in_thread(admission.may_drop, self.journal, moving.log):
                    # Not SETTLED: the settle loop, also of a restarted daemon, goes on until all nodes have confirmed it.
                    await in_thread(moving.log.mark, Mark.BEGUN, dropped=reason)
                if lost := set(lost_nodes) - set((await in_thread(moving.log.whole)).lost_nodes):
                    known = (await in_thread(moving.log.whole)).lost_nodes
                    await in_thread(moving.log.mark, moving.log.last_mark, lost_nodes=[*known, *sorted(lost)])
            if moving.log.last_mark is not Mark.SETTLED and record not in self.moves:
                self._follow_record(moving)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self.settle_once(moving)
            except dropping.NotDropped as error:
                moving.waiting_for = error.message
                return pb.DropImageReply(waiting_for=error.left)
            except TimeoutError:
                return pb.DropImageReply(waiting_for=["large images: their nodes are still at work"])
            return pb.DropImageReply()

    @step
    async def rollback(self, request: pb.RollbackRequest, by: str) -> pb.Outcome:
        """Decides that the incarnation that runs now is over, and begins to end it. Idempotent."""
        move_log = await self.rollbacks.begin(request, by, self.deciding)
        if move_log.move not in self.moves and not move_log.ended_unix_s:
            self._track(move_log).wake()
        return listing.outcome_of(self.journal, move_log)

    async def may_run(self, request: pb.MayRunRequest) -> pb.MayRunReply:
        ranks = list(request.rank_uids)
        if ended_by := await in_thread(self.rollbacks.may_run, request.incarnation, ranks):
            return pb.MayRunReply(ended_by=ended_by)
        if (after := await in_thread(records.successor, self.journal, set(ranks))) is not None:
            return pb.MayRunReply(successor=after[0], successor_endpoint=after[1])
        lost = await in_thread(self.leases.lost, ranks)
        if lost and self.leases.starting:  # as if it were still down: its machine is there, and the rank runs
            raise Busy(
                f"{self.node.config.node} has just started, and does not know yet whether it coordinates the job"
            )
        return pb.MayRunReply(ended_by=lost)

    async def outcome(self, record: str, part: str = "") -> pb.Outcome:
        """A resumption lets no copy run while this node may not coordinate the job. A snapshot is settled when it can be
        used, also if this node is lost right then. `part`: the move or the copy of one rank, which is to be named."""
        move_log = self.moving(record).log
        if move_log.committed and not move_log.ended_unix_s and move_log.record.suspension:
            await self.leases.must_hold(await in_thread(records.uids, move_log))
        found = await in_thread(listing.outcome_of, self.journal, move_log)
        if found.settled and move_log.begin.kind == "snapshot":
            found.settled, not_told = await in_thread(self.leases.is_known, move_log)
            found.not_told.extend(not_told if found.settled else ())
        if part:
            await in_thread(listing.name_part, found, move_log, part)
        return found

    async def listed(self, *, rollbacks_only: bool = False) -> pb.ListJobsReply:
        kinds = {"rollback"} if rollbacks_only else None
        found = await in_thread(listing.all_records, self.journal, self.moves, self.leases.lost, kinds)
        return pb.ListJobsReply(jobs=found)

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

    def _track(self, move_log: MoveLog) -> Moving:
        moving = Moving(move_log)
        self._follow_record(moving)
        return moving

    def _follow_record(self, moving: Moving) -> None:
        self.moves[moving.log.move] = moving
        moving.renew()
        self.follow(moving, settle_loop(moving, self.settle_once, AGAIN_S, AGAIN_S, "coordinator"))

    async def settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules. The caller holds the record's lock."""
        if moving.log.begin.kind == "rollback":
            await self.rollbacks.settle(moving, self.give_up)
            return
        move_log, parts = moving.log, dict[str, Part]()
        given_up = await in_thread(records.is_given_up, self.journal, move_log)
        for _ in range(3):
            decision, moving.waiting_for = job_rules.job_next(
                move_log.last_mark,
                move_log.outcome.outcome if move_log.outcome is not None else None,
                parts.values(),
                lease_expired=moving.lease_expired,
                given_up=given_up,
                resumes=bool(move_log.record.suspension),
            )
            match decision:
                case JobDecision.RECORD_ABORT:
                    await in_thread(move_log.decide, Outcome.ABORT, moving.waiting_for, "coordinator")
                case JobDecision.ASK:
                    if parts:
                        late = [f"{name} {part}" for name, part in parts.items() if part is not Part.DONE]
                        moving.waiting_for += f": {'; '.join(late[:5])}"
                        return
                    parts = await participants.ask_all(self.node, move_log)
                case JobDecision.TAKE_BACK:
                    lost = [f"{name} {part}" for name, part in parts.items() if part in {Part.LOST, Part.DROPPED}]
                    reason = f"{'; '.join(lost[:5])}: the job is suspended again"
                    await in_thread(move_log.mark, move_log.last_mark, taken_back=reason)  # before: see admission.py
                    await in_thread(move_log.overrule, Outcome.ABORT, reason, "coordinator")
                    parts = {}
                case JobDecision.END:
                    await participants.end_copies(self.node, move_log)
                    return
                case JobDecision.CLOSE:
                    if move_log.last_mark is not Mark.SETTLED:
                        await self._close(moving, given_up=given_up)
                    return
                case _:
                    return

    async def _close(self, moving: Moving, *, given_up: bool) -> None:
        """All have carried it out, or the job is given up. The images of a job that was resumed or given up are dropped
        first: they are of no use any more. A snapshot replaces the one before. Raises NotDropped."""
        move_log = moving.log
        record = await in_thread(move_log.whole)
        if record.gated:  # also of a suspended job: its processes have ended, and nodes forget their gates
            await self.communicators.put_back(moving)
        if move_log.committed and move_log.begin.kind == "snapshot":
            for older in await in_thread(records.replaced_by, self.journal, move_log):
                await self.give_up(older, f"replaced by {move_log.move}")
        elif (
            move_log.committed
            and (record.suspension or given_up)
            and records.drops_images(self.journal, record.suspension)
        ):
            resumed = bool(record.suspension) or await in_thread(records.resumed_by, self.journal, move_log) is not None
            images = [one for one in dropping.images_of(record) if one[0] not in record.lost_nodes]
            reason, suspension = record.dropped or move_log.move, record.suspension or move_log.move
            ended, _ = await in_thread(records.before, self.journal, suspension)
            if left := await dropping.drop(self.node, images, reason, given_up=not resumed, ended=ended):
                raise dropping.NotDropped(left)
        await in_thread(move_log.mark, Mark.SETTLED)

    async def give_up(self, move_log: MoveLog, reason: str) -> None:
        """The images of a snapshot are not needed any more. A node that does not answer now asks later."""
        await in_thread(move_log.mark, Mark.SETTLED, dropped=reason)
        log.info("snapshot %s of job %s is given up: %s", move_log.move, move_log.begin.job, reason)
        for part in (await in_thread(move_log.whole)).participants:
            for image, name, endpoint in records.images_of(part):
                request = pb.DropImageRequest(image=image, reason=reason)
                with contextlib.suppress(SnapshotError):
                    async with self.node.client(name, endpoint) as client:
                        await client.source.DropImage(request, timeout_s=ASK_S)
