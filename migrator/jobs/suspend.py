"""The steps of a suspension: one function for each call of its table."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from migrator.cluster import Cluster
from migrator.driver.peers import node_addresses, node_infos
from migrator.find_rank import Found
from migrator.job_protocol import SUSPEND, UNDO_SUSPEND, JobVerdict
from migrator.job_results import JobOptions, RankPlace
from migrator.jobs import connections
from migrator.jobs.connections import Sockets
from migrator.jobs.gates import JobGates
from migrator.jobs.walk import JobRun, each, new_id
from migrator.results import Event
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Undone, Where

#: How long connections may take to settle of which one rank was seen to have an end, and another one not.
SETTLE_S = 1.0


class Suspension(JobRun):
    table, undo, success = SUSPEND, UNDO_SUSPEND, JobVerdict.SUSPENDED
    untouched = "running, as before"
    takes_snapshot = False

    def __init__(
        self,
        cluster: Cluster,
        options: JobOptions,
        found: Sequence[Found],
        coordinator: str,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(cluster, options, found[0].rank.job, found[0].rank.user_id, on_event)
        self.coordinator = coordinator
        self.looks: dict[str, str] = {}  # by the rank's uid: its source's name for what Inspect found
        self.answering: dict[str, pb.NodeInfo] = {}  # by node
        self.gates = JobGates(cluster)
        self.participants = [
            pb.Participant(
                rank_uid=one.rank.uid,
                rank=one.rank.rank,
                move=new_id(),
                node=one.node,
                endpoint=cluster.nodes[one.node],
            )
            for one in found
        ]

    @property
    def steps(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        return {
            "Source.Inspect": self.inspect,
            "Job.Begin": self.begin_job,
            "Source.Begin": self.begin,
            "Gate.Close": self.quiesce,
            "Job.Detach": self.detach,
            "Source.Freeze": self.freeze,
            "Source.Stream": self.store,
            "Job.Commit": self.commit_job,
            "Source.Release": self.release,
            "Source.Abort": self.abort,
            "Job.Attach": self.put_back,
        }

    def places(self) -> list[RankPlace]:
        return [RankPlace(part.rank, part.rank_uid, part.node) for part in self.participants]

    async def inspect(self, timeout_s: float) -> None:
        """The ranks are not looked at in the same moment: connections that are being opened or closed, as those of
        communicators that were just built, seem to lead to no rank. So all are looked at once more before that counts."""
        self.answering = await node_infos(self.cluster)
        self.nodes = await node_addresses(self.cluster, self.answering)
        checks, connected = await self._look(timeout_s)
        if connected.verdict == pb.Check.REFUSE:
            await asyncio.sleep(SETTLE_S)
            checks, connected = await self._look(timeout_s)
        checks.append(("the job", connected))
        found = await self.gates.check(self.description, sorted({part.node for part in self.participants}))
        self.nccl = self.gates.involved
        self.refuse_if([*checks, *(("the job", one) for one in found)])

    async def _look(self, timeout_s: float) -> tuple[list[tuple[str, pb.Check]], pb.Check]:
        """The checks of each rank, and that of the connections between them."""
        checks: list[tuple[str, pb.Check]] = []
        sockets: dict[int, Sockets] = {}

        async def ask(part: pb.Participant) -> None:
            request = pb.InspectRequest(
                rank_uid=part.rank_uid,
                nodes=self.nodes,
                target_node=part.node,
                protocol=protocol.own(),
                suspend=True,
            )
            reply = await (await self.client(part.node)).source.Inspect(request, timeout_s=timeout_s)
            self.must_be(part, part.node, reply.facts.rank)
            checks.extend((f"rank {part.rank} on {part.node}", check) for check in reply.checks)
            sockets[part.rank] = Sockets(part.node, reply.rewires)
            self.looks[part.rank_uid] = reply.look
            self.inspected(part, reply)

        await each(self.participants, ask)
        return checks, connections.check(sockets)

    def inspected(self, part: pb.Participant, reply: pb.InspectReply) -> None:
        """A rank was looked at, and nothing has been changed yet."""

    async def begin(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.BeginRequest(
                move=part.move,
                rank_uid=part.rank_uid,
                lease_s=self.options.lease_s,
                nodes=self.nodes,
                coordinator=self.coordinates,
                look=self.looks[part.rank_uid],
                snapshot=self.takes_snapshot,
                incarnation=part.incarnation,
            )
            await (await self.client(part.node)).source.Begin(request, timeout_s=timeout_s)

        await each(self.participants, ask)

    @property
    def description(self) -> pb.MoveDescription:
        """The record, as nodes journal it that close gates for it."""
        first = self.participants[0]
        here = (self.coordinator, self.cluster.nodes[self.coordinator])
        return pb.MoveDescription(
            move=self.record,
            rank_uid=first.rank_uid,
            rank=first.rank,
            job=self.job,
            user_id=self.user_id,
            source_node=here[0],
            source_endpoint=here[1],
            target_node=here[0],
            target_endpoint=here[1],
            nonce=self.gates.nonce,
            whole_job=True,
        )

    async def quiesce(self, timeout_s: float) -> None:
        await self.gates.quiesce(self.description, timeout_s)

    async def detach(self, timeout_s: float) -> None:
        request = pb.MoveRequest(move=self.record)
        await (await self.client(self.coordinator)).job.Detach(request, timeout_s=timeout_s)

    async def put_back(self, timeout_s: float) -> None:
        """Part of an undo. If it fails, the coordinator goes on trying."""
        try:
            await self.attach(timeout_s)
        except SnapshotError as error:
            self.unconfirmed.append(f"its communicators: {error.message}")

    async def freeze(self, timeout_s: float) -> None:
        """The cut. What the freeze found decides, not what preflight saw."""
        sockets: dict[int, Sockets] = {}

        async def ask(part: pb.Participant) -> None:
            request = pb.MoveRequest(move=part.move)
            reply = await (await self.client(part.node)).source.Freeze(request, timeout_s=timeout_s)
            sockets[part.rank] = Sockets(part.node, reply.rewires)
            self.add_parts(reply.parts)
            self.warnings += [f"rank {part.rank} on {part.node}: {warning}" for warning in reply.warnings]

        await each(self.participants, ask)
        found = connections.check(sockets)
        if found.verdict == pb.Check.REFUSE:
            raise Undone(
                f"the connections have changed since they were checked: {found.reason}",
                remedy=f"retry in a moment; if it happens again: {found.remedy}",
                where=Where.SOURCE_FROZEN,
            )

    async def store(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.MoveRequest(move=part.move)
            stream = (await self.client(part.node)).source.Stream(request, timeout_s=timeout_s)
            async for progress in stream:
                self.sent("store", part.move, progress)
                self.add_parts(progress.parts)

        await each(self.participants, ask)

    async def release(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.MoveRequest(move=part.move)
            reply = await (await self.client(part.node)).source.Release(request, timeout_s=timeout_s, retry=True)
            if not reply.released:
                raise Undone(f"rank {part.rank} on {part.node} is not released yet: {reply.waiting_for}")

        await each(self.participants, ask)

    async def abort(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            request = pb.AbortRequest(move=part.move, reason="the suspension of the job was undone")
            outcome = await (await self.client(part.node)).source.Abort(request, timeout_s=timeout_s)
            if not outcome.settled:
                raise Undone(f"it is not thawed yet: {outcome.reason}", where=Where.SOURCE_FROZEN)

        await self.each_confirms(ask)

    async def renew_parts(self, timeout_s: float) -> None:
        async def ask(part: pb.Participant) -> None:
            with contextlib.suppress(SnapshotError):
                request = pb.MoveRequest(move=part.move)
                await (await self.client(part.node)).source.Renew(request, timeout_s=timeout_s)

        await asyncio.gather(*(ask(part) for part in self.participants))
