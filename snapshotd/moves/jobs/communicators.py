"""Takes all communicators of a job down for a suspension or a snapshot, and builds them again: in place, or with the copies
that are held for a resumption.

The coordinator does it, as the source of a move does for one rank. Invariant: nothing is remembered here. The processes are
asked which communicators they are in, and which of these are down, so a restarted coordinator, or another one that brings the
job back from its images, needs no record of them. Communicators change only behind closed gates, and the gates of a job open
in the coordinator's word alone, once what is down was built again, or can never be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone, SnapshotError, Timeout, Undone, Unreachable, Where
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl.communicators import GRACE_S, READY_S, Communicators
from snapshotd.moves.nccl.membership import down_of, on_node, whole
from snapshotd.moves.nccl.on_nodes import on_all
from snapshotd.moves.record_parts import JobPart
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

OPEN_S = 15.0
#: A node with ranks of the job that is silent for this long counts as gone: the others go on, and get NCCL's errors.
GONE_S = 240.0


class JobCommunicators:
    """One instance per daemon."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators

    async def detach(self, moving: Moving) -> pb.DetachReply:
        """Takes down every communicator of the job, on all members, and closes what NCCL keeps open. If it fails some are
        down, and the driver aborts. The caller holds the record's lock."""
        began, names = host.boottime_s(), await self._nodes(moving)
        reports = await self.communicators.reports(moving, names)
        membership, problems = whole(reports)
        if problems:
            raise Undone(
                f"communicators cannot be taken down: {'; '.join(problems[:5])}",
                remedy="if the job was just creating or destroying them, a plain retry is safe; shim/README.md lists what"
                " cannot be taken down",
                where=Where.SOURCE_RUNNING,
            )
        await reach(Point.BEFORE_DETACH)
        limit_s = self.communicators.limit_s(membership)
        uids = {name: sorted({one.rank_uid for one in reports[name].processes}) for name in names}
        await on_all(
            [name for name in names if uids[name]],
            lambda name: self.communicators.detach_on(
                moving, name, on_node(membership, name)[0], uids[name], limit_s, close_devices=True
            ),
        )
        await reach(Point.DETACH)
        log.info("took all %d communicators of job %s down", len(membership), moving.log.begin.job)
        return pb.DetachReply(comms=len(membership), seconds=host.boottime_s() - began)

    async def attach(self, moving: Moving) -> pb.AttachReply:
        """Builds them again: with the held copies of a resumption, else in place, and then opens the gates. Idempotent.
        The caller holds the record's lock."""
        if moving.log.record.suspension:
            return await self._attach_copies(moving)
        return await self.put_back(moving)

    async def _attach_copies(self, moving: Moving) -> pb.AttachReply:
        """All copies are held. Each loads a fresh NCCL first, and says which communicators it was in."""
        names = await self._nodes(moving)
        parts = (await in_thread(moving.log.whole)).participants
        reports: dict[str, pb.GateReport] = {}

        async def ready(name: str) -> None:
            uids = [part.rank_uid for part in parts if part.node == name]
            request = pb.AttachRequest(move=moving.log.move, rank_uids=uids)
            reply = await self.communicators.attach_request(moving, name, request, READY_S + GRACE_S)
            reports[name] = pb.GateReport(processes=reply.processes)

        await on_all(names, ready)
        membership, problems = down_of(reports)
        if problems:
            raise Undone(
                f"communicators cannot be built again: {'; '.join(problems[:5])}",
                remedy="the images stay; `migrator job drop` gives the job up",
                where=Where.SUSPENDED,
            )
        if not membership:
            return pb.AttachReply()
        reply = await self.communicators.build(moving, membership, self.communicators.node.config.node)
        await reach(Point.ATTACH)
        return reply

    async def put_back(self, moving: Moving) -> pb.AttachReply:
        """The ranks run where they were, behind their gates: builds again what is down, and opens the gates. Communicators
        of which a member has ended stay down, and the job gets NCCL's errors. Raises what keeps the gates closed: retry."""
        record = await in_thread(moving.log.whole)
        if not record.gated or record.gates_opened:
            return pb.AttachReply()
        reply, why = await self._build_what_is_down(moving)
        await self._open(moving, abandoned=bool(why))
        await in_thread(moving.log.mark, moving.log.last_mark, gates_opened=True)
        reply.abandoned = why
        return reply

    async def _build_what_is_down(self, moving: Moving) -> tuple[pb.AttachReply, str]:
        """Also returns why some communicators are never built again; empty: all are up."""
        names, gone = await self._nodes(moving), ""
        for again in (True, False):  # a short failure is retried once before it is reported
            try:
                answers = await asyncio.gather(
                    *(self.communicators.report(moving, name) for name in names), return_exceptions=True
                )
                reports = {
                    name: one for name, one in zip(names, answers, strict=True) if isinstance(one, pb.GateReport)
                }
                if silent := [name for name in names if name not in reports]:
                    gone = self._gone(moving, silent, answers)
                else:
                    moving.answered_s = host.boottime_s()
                membership, problems = down_of(reports)
                reply = pb.AttachReply()
                if membership:
                    # Those that some members have built already are taken down first; the others are down.
                    await self.communicators.detach_all(moving, membership)
                    here = self.communicators.node.config.node
                    reply = await self.communicators.build(moving, membership, here)
                    await reach(Point.ATTACH)
                return reply, "; ".join([*filter(None, [gone]), *problems[:3]])
            except RankGone as error:
                return pb.AttachReply(), error.message
            except (SnapshotError, OSError) as error:
                if not again:
                    raise
                log.warning("building the communicators of job %s again: %s", moving.log.begin.job, error)
        raise AssertionError("not reached")

    def _gone(self, moving: Moving, silent: Sequence[str], answers: Sequence[object]) -> str:
        """Raises the failure of a node that does not answer, unless it has been silent for so long that it counts as gone."""
        error = next(one for one in answers if isinstance(one, BaseException))
        if not isinstance(error, (Unreachable, Timeout)) or host.boottime_s() - moving.answered_s < GONE_S:
            raise error
        return f"{', '.join(silent)} did not answer for {GONE_S:.0f} s"

    async def _open(self, moving: Moving, *, abandoned: bool) -> None:
        """Opens all gates of the job. A node that is gone asks when it is back."""
        request = pb.TokenRequest(move=moving.log.move, abandoned=abandoned)
        here = self.communicators.node.config.node

        async def tell(name: str) -> None:
            try:
                if name == here:
                    reply = await self.communicators.members.gates.open(request.move, b"", here, abandoned=abandoned)
                else:
                    async with self.communicators.client(moving, name) as client:
                        reply = await client.gate.Open(request, timeout_s=OPEN_S)
            except (Unreachable, Timeout):
                if abandoned and host.boottime_s() - moving.answered_s >= GONE_S:
                    return
                raise
            if not reply.opened:
                raise Undone(f"the gates on {name} are not open yet: {reply.waiting_for}", where=Where.UNKNOWN)

        await on_all(await self._nodes(moving), tell)

    async def _nodes(self, moving: Moving) -> list[str]:
        """The nodes of the participants; this daemon can call them after this."""
        parts: list[JobPart] = (await in_thread(moving.log.whole)).participants
        endpoints = {part.node: part.endpoint for part in parts}
        moving.nodes = [pb.NodeAddresses(name=name, endpoint=endpoint) for name, endpoint in endpoints.items()]
        return sorted(endpoints)
