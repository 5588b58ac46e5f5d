"""Rolls a job back: ends its incarnation on all nodes, after which the images of its last snapshot are the job.

Invariant: the record of a rollback has the outcome COMMIT from its beginning, and that decides: from then on no process of
the incarnation that it names may run. It is settled when every node has answered that it has none, or cannot have one. Only
then can the job be resumed, like a suspended one, from the images that the record names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, NotFound, SnapshotError, Usage, Where, WrongState
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Ended, JobDecision, Part
from snapshotd.moves.jobs import dropping, lost_time, participants, records
from snapshotd.moves.jobs.lease import Leases
from snapshotd.moves.jobs.machines import answers
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ClusterNode
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

END_S = 30.0
ASK_S = 5.0


def rolled_back_already(before: MoveLog) -> WrongState:
    return WrongState(
        f"job {before.begin.job} is rolled back already ({before.move}), and not resumed yet",
        remedy=f"`migrator job resume {before.begin.job}` resumes it",
        where=Where.SUSPENDED,
    )


def _runs_now(ranks: Iterable[tuple[str, pb.Rank]], default: str) -> str:
    """The incarnation of a job whose former coordinator is lost: it may have rolled the job back before."""
    found = {rank.incarnation for _, rank in ranks if rank.place == pb.Rank.HERE}
    return found.pop() if len(found) == 1 else default


def _must_be_of(ranks: Iterable[tuple[str, pb.Rank]], ends: str, snapshot: MoveLog) -> None:
    """Raises WrongState if a rank of the job is of another incarnation: the job was suspended and resumed since the snapshot,
    and only the coordinator of that resumption could end it."""
    for node, rank in ranks:
        if rank.place == pb.Rank.SUSPENDED:
            raise WrongState(
                f"job {snapshot.begin.job} is suspended: {node} has the image of rank {rank.rank}",
                remedy=f"`migrator job resume {snapshot.begin.job}` brings it back from there",
                where=Where.SUSPENDED,
            )
        if rank.place == pb.Rank.HERE and rank.incarnation != ends:
            raise WrongState(
                f"job {snapshot.begin.job} was suspended and resumed since its snapshot",
                remedy="take a new snapshot with `migrator job snapshot`",
                where=Where.UNTOUCHED,
            )


class Rollbacks:
    """The coordinator's part. One instance per daemon."""

    def __init__(self, node: Node, moves: Mapping[str, Moving], leases: Leases) -> None:
        """`moves`: the records of this coordinator that have not ended."""
        self.node, self.journal, self.moves, self.leases = node, node.journal, moves, leases
        self._silent_since_s: dict[tuple[str, str], float] = {}  # (record, node) -> CLOCK_BOOTTIME

    async def begin(self, request: pb.RollbackRequest, by: str, deciding: asyncio.Lock) -> MoveLog:
        """Journals and decides a rollback. Raises, with nothing changed, if it is not possible now."""
        check_move_id(request.record)
        if (known := self.journal.find(request.record)) is not None:
            if known.begin.kind != "rollback":
                raise Usage(f"{request.record} is not a rollback")
            if not known.ended_unix_s and (lost := {*known.record.lost_nodes, *request.lost_nodes}):
                await in_thread(known.mark, known.last_mark, lost_nodes=sorted(lost))
                if (before := self.journal.find(known.record.snapshot)) is not None:
                    await self.leases.declare(before, lost)
            return known
        nodes = [ClusterNode.of(node) for node in request.nodes]
        async with deciding:
            snapshot, ends = await in_thread(self._examined, request)
            await self.leases.declare(snapshot, request.lost_nodes)
            await self.leases.must_hold(records.uids(snapshot))
            await self._must_be_bound(snapshot, request.lost_nodes)
            whole = await in_thread(snapshot.whole)
            names = {node.name for node in nodes}
            nodes += [node for node in whole.nodes if node.name not in names]
            uids = [part.rank_uid for part in whole.participants]
            ranks = [(node, rank) for node, rank in await self._ranks_on(nodes) if rank.uid in uids]
            if whole.adopted_from and ends == whole.participants[0].incarnation:
                ends = _runs_now(ranks, ends)
            _must_be_of(ranks, ends, snapshot)
            await self._end_snapshots(snapshot)
            begin, here = snapshot.begin, (self.node.config.node, self.node.config.advertise)
            move_log = await in_thread(
                self.journal.begin,
                Begin(
                    *(request.record, "job", "", begin.job, 0, *here, *here, "00" * 32, host.boot_id(), time.time()),
                    lease_s=60,
                    user_id=begin.user_id,
                    kind="rollback",
                ),
            )
            await in_thread(
                move_log.mark,
                Mark.BEGUN,
                participants=whole.participants,
                nodes=nodes,
                snapshot=snapshot.move,
                ends=ends,
                lost_nodes=list(request.lost_nodes),
                **await in_thread(lost_time.at_rollback, self.journal, snapshot, request.down_for_s, time.time()),
                fenced=whole.fenced,
            )
            await reach(Point.BEFORE_ROLLBACK)
            await self.leases.must_hold(uids)
            await in_thread(move_log.decide, Outcome.COMMIT, request.reason or "rolled back", by)
            await reach(Point.ROLLBACK)
        return move_log

    def _examined(self, request: pb.RollbackRequest) -> tuple[MoveLog, str]:
        """The snapshot, and the incarnation that is to end. Raises unless the job may be rolled back to it now."""
        snapshot = self.journal.find(check_move_id(request.snapshot))
        if snapshot is None or snapshot not in records.current(self.journal):
            raise NotFound("this node has no such snapshot", remedy="`migrator job list` shows the snapshots of jobs")
        job, ranks = snapshot.begin.job, records.uids(snapshot)
        if newer := [
            one for one in records.current(self.journal) if snapshot in records.replaced_by(self.journal, one)
        ]:
            raise WrongState(f"job {job} has a newer snapshot ({newer[-1].move})", where=Where.UNTOUCHED)
        for moving in list(self.moves.values()):
            other = moving.log
            if other.begin.kind != "snapshot" and records.uids(other) & ranks:
                raise Busy(f"job {job} is being suspended, resumed or rolled back ({other.move})")
        if before := records.rolled_back(self.journal, ranks):
            raise rolled_back_already(before)
        if since := records.suspended_since(self.journal, snapshot):
            raise self._suspended(job, since)
        return snapshot, records.incarnation(self.journal, snapshot)

    def _suspended(self, job: str, since: MoveLog) -> WrongState:
        if records.resumed_by(self.journal, since) is None and not since.whole().dropped:
            return WrongState(
                f"job {job} is suspended ({since.move})",
                remedy=f"`migrator job resume {job}` brings it back from there",
                where=Where.SUSPENDED,
            )
        return WrongState(
            f"job {job} was suspended and resumed since its snapshot",
            remedy="take a new snapshot with `migrator job snapshot`",
            where=Where.UNTOUCHED,
        )

    async def _must_be_bound(self, snapshot: MoveLog, lost_nodes: Collection[str]) -> None:
        """Raises Busy while a rank may not know yet that this coordinator may end it: it would go on beside its next copy.
        After an earlier snapshot that was confirmed all of them know, and so do copies that were resumed from it."""
        older = await in_thread(records.replaced_by, self.journal, snapshot)
        if any(one.ended_unix_s and records.uids(one) >= records.uids(snapshot) for one in (snapshot, *older)):
            return
        await participants.ask_all(self.node, snapshot)  # what they have carried out is journalled
        whole = await in_thread(snapshot.whole)
        parts: dict[str, Part] = {}
        for part in whole.participants:
            done = part.move in whole.done and parts.get(part.node, Part.DONE) is Part.DONE
            parts[part.node] = Part.DONE if done else Part.READY
        if left := job_rules.unbound(parts, lost_nodes):
            raise Busy(
                f"{', '.join(left)} did not confirm yet that snapshot {snapshot.move} counts",
                remedy="retry; if such a node is lost, declare it dead: `migrator job rollback --lost NODE`",
                where=Where.UNTOUCHED,
            )

    async def _ranks_on(self, nodes: Iterable[ClusterNode]) -> list[tuple[str, pb.Rank]]:
        """With the nodes that have them. Those of nodes that do not answer are missing."""

        async def ask(node: ClusterNode) -> list[tuple[str, pb.Rank]]:
            try:
                async with self.node.client(node.name, node.endpoint) as client:
                    reply = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_S)
            except SnapshotError:
                return []
            return [(node.name, rank) for rank in reply.ranks]

        return [one for ranks in await asyncio.gather(*map(ask, nodes)) for one in ranks]

    async def _end_snapshots(self, current: MoveLog) -> None:
        """A snapshot that is being taken cannot be completed any more."""
        ranks = await in_thread(records.uids, current)
        for moving in list(self.moves.values()):
            same = moving.log.begin.kind == "snapshot" and records.uids(moving.log) & ranks
            if same and moving.log.outcome is None:
                await in_thread(moving.log.decide, Outcome.ABORT, "the job is rolled back", "coordinator")
                moving.wake()

    async def settle(self, moving: Moving, give_up: Callable[[MoveLog, str], Awaitable[None]]) -> None:
        """Has the incarnation ended everywhere. If the job was given up after that, drops its images, and `give_up` drops
        its snapshot. The caller holds the record's lock. Raises NotDropped."""
        move_log, record = moving.log, moving.log.record
        if move_log.outcome is None:  # a crash before the decision
            await in_thread(move_log.decide, Outcome.ABORT, "it was never decided", "coordinator")
            await in_thread(move_log.mark, Mark.SETTLED)
            return
        if move_log.last_mark is Mark.SETTLED:
            return
        request = pb.EndRanksRequest(
            record=move_log.move, incarnation=record.ends, rank_uids=[part.rank_uid for part in record.participants]
        )
        asked = [node for node in record.nodes if node.name not in record.lost_nodes]
        found = await asyncio.gather(*(self._ask(node, request, record.fenced) for node in asked))
        answers = {node.name: answer for node, answer in zip(asked, found, strict=True)}
        decision, moving.waiting_for = job_rules.rollback_next({name: answer for name, (answer, _) in answers.items()})
        late = [f"{name}: {why or answer}" for name, (answer, why) in answers.items() if answer not in job_rules.OVER]
        if late:
            moving.waiting_for += f": {'; '.join(late[:5])}"
        if decision is JobDecision.CLOSE:
            if record.dropped:
                await self._drop_images(move_log)
                if (snapshot := self.journal.find(record.snapshot)) is not None:
                    await give_up(snapshot, record.dropped)
            await in_thread(move_log.mark, Mark.SETTLED)
            await reach(Point.ROLLED_BACK)

    async def _drop_images(self, move_log: MoveLog) -> None:
        """The home keepers end, as if their ranks were killed."""
        record = await in_thread(move_log.whole)
        places = [place for part in record.participants for place in records.images_of(part)]
        images = [(node, endpoint, image) for image, node, endpoint in places if node not in record.lost_nodes]
        ended, _ = await in_thread(records.before, self.journal, move_log.move)
        if left := await dropping.drop(self.node, images, record.dropped, given_up=True, ended=ended):
            raise dropping.NotDropped(left)

    async def _ask(self, node: ClusterNode, request: pb.EndRanksRequest, fenced: str) -> tuple[Ended, str]:
        """Whether a node has ended the incarnation, and why not. `fenced`: the former coordinator, whose lease is over."""
        place, asked_s = (request.record, node.name), host.boottime_s()
        # The machine first: a call to one that is silent would take all of END_S.
        if node.name != self.node.config.node and not await answers(node.endpoint, if_unknown=True):
            why = f"node {node.name} at {node.endpoint} does not answer"
            if (first_s := self._silent_since_s.setdefault(place, asked_s)) == asked_s:
                return Ended.SILENT, why  # one attempt that is lost on the way says little
            found = Ended.CUT_OFF if node.name == fenced else job_rules.silent_node(host.boottime_s() - first_s)
            # Twice in a row at last: between two that were lost the node may have been heard.
            if found is not Ended.CUT_OFF or not await answers(node.endpoint, if_unknown=True):
                return found, why
        self._silent_since_s.pop(place, None)
        try:
            async with self.node.client(node.name, node.endpoint) as client:
                reply = await client.job.EndRanks(request, timeout_s=END_S)
        except SnapshotError as error:
            return Ended.DAEMON_DOWN, error.headline
        return (Ended.NOT_YET, "; ".join(reply.waiting_for[:3])) if reply.waiting_for else (Ended.ENDED, "")

    def may_run(self, incarnation: str, rank_uids: Sequence[str]) -> str:
        """The record that has ended this incarnation of these ranks; empty: none, they may run. Blocking."""
        for one in self.journal.all():
            if (one.begin.role, one.begin.kind) == ("job", "rollback") and one.committed:
                known = one.whole()
                uids = {part.rank_uid for part in known.participants}
                if known.ends == incarnation and uids & set(rank_uids):
                    return one.move
        return ""
