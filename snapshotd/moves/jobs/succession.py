"""Gives the snapshots of a job another coordinator: the former one has handed them over, or is lost.

Invariant: at most one coordinator can roll a job back. One that leaves records first that it never will again. One that is
lost has lost its lease (lease.py): the successor has the promises of a majority. Where there is no majority, because only two
nodes keep the snapshot, the former one must be silent, and an operator must have declared it dead (--lost). A node asks the
former one itself before it obeys the successor, and then obeys the former one no more. The successor has the record of the
snapshot before the first node is told, because nodes drop images that their coordinator does not know. A former coordinator
that comes back asks, learns of its successor, and ends what it has of the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Damaged, NotFound, SnapshotError, Usage, Where, WrongState
from snapshotd.moves import description
from snapshotd.moves.jobs import made_image, records
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.jobs.lease import EVERY_S, Successor
from snapshotd.moves.jobs.machines import answers
from snapshotd.moves.jobs.rollback import rolled_back_already
from snapshotd.moves.jobs.tether import bind
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ClusterNode, JobPart
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.steps import step
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.repeated import Repeated

log = logging.getLogger(__name__)

ASK_S = 5.0


class Succession:
    """One instance per daemon."""

    def __init__(
        self,
        node: Node,
        jobs: JobSteps,
        images: StoredImages,
        source: SourceSteps,
        target: TargetSteps,
        endings: Endings,
    ) -> None:
        self.node, self.jobs, self.images, self.source, self.target = node, jobs, images, source, target
        self.endings = endings
        self.repeated = Repeated("leases of snapshots", self.look, EVERY_S)

    async def kept(self) -> pb.ListKeptReply:
        """The images of snapshots that are kept here. One that cannot be read is left out: the others may be needed."""
        return pb.ListKeptReply(images=await in_thread(lambda: list(self._all_kept())))

    def _all_kept(self) -> Iterator[pb.KeptImage]:
        for move_log in self.images.of_snapshots():
            try:
                yield self._kept(move_log)
            except (OSError, Damaged, NotFound) as error:
                log.error("the image %s of %s is of no use: %s", move_log.move, move_log.begin.rank_uid, error)

    def _kept(self, move_log: MoveLog) -> pb.KeptImage:
        begin = move_log.begin
        folder, record = self.node.store_of(begin).path(move_log.move), move_log.whole()
        return pb.KeptImage(
            image=move_log.move,
            record=begin.coordinator,
            is_copy=begin.kind == "copy",
            rank_uid=begin.rank_uid,
            rank=begin.rank,
            job=begin.job,
            user_id=max(begin.user_id, 0),
            incarnation=description.decode((folder / description.FILE).read_bytes()).incarnation,
            coordinator_node=record.successor_node or begin.coordinator_node,
            begun_unix_s=begin.begun_unix_s,
            settled=(promise := self.jobs.promises.of(begin.coordinator)) is not None and promise.settled,
            copies=record.asked_copies,
            made_on=made.node if (made := made_image.load(move_log)) is not None else "",
        )

    # ------------------------------------------------------------------ the former coordinator

    @step
    async def hand_over(self, record: str, successor: str, by: str) -> pb.Outcome:
        """From now on another node may roll the job back to this snapshot, and this one never does. Idempotent."""
        async with self.jobs.deciding:
            snapshot = self.node.journal.find(check_move_id(record))
            if snapshot is None or snapshot.begin.kind != "snapshot" or not snapshot.committed:
                raise NotFound(
                    "this node has no such snapshot", remedy="`migrator job list` shows the snapshots of jobs"
                )
            handed_to = (await in_thread(snapshot.whole)).handed_to
            if handed_to not in {"", successor}:
                raise WrongState(f"{record} was handed over to {handed_to}", where=Where.UNTOUCHED)
            if not handed_to:
                ranks = await in_thread(records.uids, snapshot)
                if before := await in_thread(records.rolled_back, self.node.journal, ranks):
                    raise rolled_back_already(before)
                busy = [one.log.move for one in self.jobs.moves.values() if records.uids(one.log) & ranks]
                if busy or snapshot.last_mark is not Mark.SETTLED:
                    raise Busy(
                        f"job {snapshot.begin.job} is being snapshotted, suspended or resumed", where=Where.UNTOUCHED
                    )
                await in_thread(snapshot.mark, Mark.SETTLED, handed_to=successor)
                endpoint = await in_thread(records.endpoint, snapshot, successor)
                await self._follow(self.node.config.node, ranks, successor, endpoint)
                log.warning(
                    "snapshot %s of job %s is handed over to %s by %s", record, snapshot.begin.job, successor, by
                )
        return await self.jobs.outcome(record)

    async def look(self) -> None:
        """Renews the leases of this node's snapshots. Ends its ranks of jobs whose lease is lost, or that another node
        coordinates now."""
        lost, successors = await self.jobs.leases.renew()
        for snapshot in lost:
            ranks = await in_thread(records.uids, snapshot)
            await self._end_ranks(ranks, await in_thread(self.jobs.leases.lost, ranks))
        for one in successors:
            await self._step_down(one)

    async def _end_ranks(self, ranks: set[str], why: str) -> None:
        """Those that this node coordinates itself, also if they do not know it yet."""
        here = self.node.config.node
        mine = [one for one in self.node.ranks.all() if one.uid in ranks and not one.away_node]
        mine = [one for one in mine if one.coordinator_node in {"", here}]
        for entry in mine:
            if not entry.coordinator_node:
                entry.tethered = True
                await bind(self.node, entry, here, self.node.config.advertise)
        over = await in_thread(self.endings.ended_ones)
        await self.endings.cut_off([entry for entry in mine if entry not in over], why)

    async def _step_down(self, one: Successor) -> None:
        """Another node coordinates the job: the records here end, and so do the ranks, which it has rolled back."""
        ranks, why = await in_thread(records.uids, one.snapshot), f"{one.node} coordinates the job now"
        log.warning("job %s: %s", one.snapshot.begin.job, why)
        await self._end_ranks(ranks, why)
        async with self.jobs.deciding:
            for record in await in_thread(records.of_ranks, self.node.journal, ranks):
                await self._close(record, one.node, why)
        await self._follow(self.node.config.node, ranks, one.node, one.endpoint)

    async def _follow(self, former: str, ranks: set[str], successor: str, endpoint: str) -> None:
        """Binds what is here of these ranks to the successor: images, and ranks that have not ended."""
        for move_log in await in_thread(self._bound_to, former, ranks):
            if move_log.ended_unix_s:
                await in_thread(
                    move_log.mark, move_log.last_mark, successor_node=successor, successor_endpoint=endpoint
                )
        over = await in_thread(self.endings.ended_ones)
        for entry in self.node.ranks.all():
            if entry.uid in ranks and entry.coordinator_node == former and entry not in over:
                await bind(self.node, entry, successor, endpoint)

    async def _close(self, record: MoveLog, successor: str, why: str) -> None:
        """Ends one record of a job that another node coordinates. The images of a suspended job stay."""
        whole = await in_thread(record.whole)
        if record.outcome is None:
            await in_thread(record.decide, Outcome.ABORT, why, successor)
        elif record.begin.kind == "snapshot" and record.committed and not whole.handed_to:
            await in_thread(record.mark, Mark.SETTLED, handed_to=successor)
        elif record.begin.kind == "rollback" and record.committed and not whole.dropped:
            await in_thread(record.mark, Mark.SETTLED, dropped=why)
        elif whole.suspension and record.committed and not record.ended_unix_s:
            await in_thread(record.overrule, Outcome.ABORT, why, successor)  # no copy that waits for it may run
            await in_thread(record.mark, Mark.SETTLED)

    # ------------------------------------------------------------------ its successor

    @step
    async def adopt(self, request: pb.AdoptRequest, by: str) -> pb.Outcome:
        """Keeps the record of a complete snapshot from now on. Idempotent."""
        check_move_id(request.record)
        if not request.participants:
            raise Usage("a snapshot has participants")
        handed_over = await self._must_have_left(
            request.record, request.former, request.former_endpoint, self.node.config.node
        )
        quorums, by_lease = await self.jobs.leases.take(request, handed_over=handed_over)
        fenced = request.former if by_lease else ""
        async with self.jobs.deciding:
            known = self.node.journal.find(request.record)
            if known is None:
                await in_thread(self._adopt, request, quorums, fenced, by)
            elif known.begin.kind != "snapshot" or not known.committed:
                raise WrongState(f"{request.record} is another record here", where=Where.UNTOUCHED)
            else:  # it comes back
                await in_thread(
                    known.mark,
                    Mark.SETTLED,
                    handed_to="",
                    adopted_from=request.former,
                    adopted_unix_s=time.time(),
                    quorums=quorums,
                    lost_nodes=list(request.lost_nodes),
                    fenced=fenced,
                    asked_copies=request.copies,
                )
        return await self.jobs.outcome(request.record)

    def _adopt(self, request: pb.AdoptRequest, quorums: list[list[str]], fenced: str, by: str) -> None:
        here = (self.node.config.node, self.node.config.advertise)
        move_log = self.node.journal.begin(
            Begin(
                *(request.record, "job", "", request.job, 0, *here, *here, "00" * 32, host.boot_id(), time.time()),
                lease_s=60,
                user_id=request.user_id,
                kind="snapshot",
            )
        )
        parts = [JobPart.of(one) for one in request.participants]
        for part in parts:
            check_move_id(part.move)
        nodes = [ClusterNode.of(node) for node in request.nodes]
        move_log.mark(
            Mark.BEGUN,
            participants=parts,
            nodes=nodes,
            adopted_from=request.former,
            adopted_unix_s=time.time(),
            quorums=quorums,
            lost_nodes=list(request.lost_nodes),
            fenced=fenced,
            asked_copies=request.copies,
        )
        move_log.decide(Outcome.COMMIT, f"taken over from {request.former}", by)
        move_log.mark(Mark.SETTLED, done=[part.move for part in parts])
        move_log.fold()

    # ------------------------------------------------------------------ every node

    @step
    async def succeed(self, request: pb.SucceedRequest, by: str) -> pb.SucceedReply:
        """Binds what is here of these ranks to the successor instead of the former coordinator. Idempotent."""
        former, ranks = request.former, set(request.rank_uids)
        entries = [one for one in self.node.ranks.all() if one.uid in ranks and one.coordinator_node == former]
        logs = await in_thread(self._bound_to, former, ranks)
        if not entries and not logs:
            return pb.SucceedReply()
        await self._must_have_left(request.record, former, request.former_endpoint, request.successor)
        reason = f"{request.successor} coordinates the job instead of {former} ({by})"
        for steps in (self.source, self.target):
            for moving in list(steps.moves.values()):
                if moving.log in logs and moving.log.outcome is None:
                    await self._abort(moving, reason, by)
        await self._follow(former, ranks, request.successor, request.successor_endpoint)
        log.warning("%s", reason)
        return pb.SucceedReply()

    def _bound_to(self, former: str, ranks: set[str]) -> list[MoveLog]:
        """The moves of these ranks about which that coordinator decides, and the images that it keeps. Blocking."""
        found = []
        for one in self.node.journal.all():
            if one.begin.role in {"source", "target"} and one.begin.rank_uid in ranks and one.begin.coordinator_node:
                bound_to = one.whole().successor_node or one.begin.coordinator_node
                if bound_to == former and (one.begin.kind or not one.ended_unix_s):
                    found.append(one)
        return found

    async def _abort(self, moving: Moving, reason: str, by: str) -> None:
        """No other node decides this any more. The job is rolled back next, whether or not it was decided before."""
        if moving.log.begin.role == "source":
            async with self.source.ending(moving, "abort"):
                await self.source.stop_streaming(moving)
                await self.source.record(moving, Outcome.ABORT, reason, by)
        else:
            async with self.target.ending(moving, "abort"):
                await self.target.learn(moving, Outcome.ABORT, reason, by)
        moving.wake()

    async def _must_have_left(self, record: str, former: str, endpoint: str, successor: str) -> bool:
        """Raises WrongState unless the former coordinator has handed the snapshot over (True), or is silent."""
        if former == self.node.config.node:
            known = self.node.journal.find(record)
            if known is None or (await in_thread(known.whole)).handed_to != successor:
                raise WrongState(f"{former} coordinates the job itself", where=Where.UNTOUCHED)
            return True
        # The machine first: a call to one that is silent would take all of ASK_S. Twice: an attempt may be lost on the way.
        if not await answers(endpoint, if_unknown=True) and not await answers(endpoint, if_unknown=True):
            return False
        try:
            async with self.node.client(former, endpoint) as client:
                found = await client.job.GetOutcome(pb.MoveRequest(move=record), timeout_s=ASK_S)
        except NotFound:
            raise WrongState(
                f"{former}, the coordinator of the job, answers and has no record {record}", where=Where.UNTOUCHED
            ) from None
        except SnapshotError as error:
            raise WrongState(
                f"the machine of {former}, which coordinates the job, is there: {error.headline}",
                remedy=f"start snapshotd on {former}, then retry, without --lost {former} if it was given",
                where=Where.UNTOUCHED,
            ) from error
        if found.handed_to != successor:
            raise WrongState(
                f"{former} answers, and coordinates the job",
                remedy=f"retry, without --lost {former} if it was given",
                where=Where.UNTOUCHED,
            )
        return True
