"""Coordinates, on the source, taking down and rebuilding the moving rank's communicators on all nodes.

The source does it, not the driver, because it must also work without a driver: after ABORT the rank's communicators are
built again here. Invariant: the communicators and all their members are in the journal before the first is taken down. If
any member is unknown, nothing is changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import RankGone, Refused, SnapshotError, Timeout, Unreachable, Where, WrongState
from snapshotd.inprocess import ncclctl
from snapshotd.keepers.listing import ranks_of
from snapshotd.moves import rules
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import gate_processes, leftovers
from snapshotd.moves.nccl.members import CLOSE_DEVICES_S, NEW_ID_S, Members
from snapshotd.moves.nccl.membership import Membership, ended_since, membership_of, nodes_of, on_node, placed, untried
from snapshotd.moves.nccl.on_nodes import on_all
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.moves.where import where_of
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: What a call may take beyond the work itself.
GRACE_S = 5.0
REPORT_S, LIST_S, OPEN_S, GIVE_UP_S, ALIVE_S = 15.0, 10.0, 5.0, 5.0, 10.0
#: The held copy is continued and loads a fresh copy of NCCL.
READY_S = 60.0


class Communicators:
    """One instance per daemon."""

    def __init__(self, node: Node, members: Members) -> None:
        self.node, self.members = node, members

    # ------------------------------------------------------------------ the steps, for the driver

    async def detach(self, moving: Moving) -> pb.DetachReply:
        """Takes down every communicator that the rank is in, on all members, and then closes the RDMA devices of its NCCL.
        Other members keep theirs: they go on with the copy of NCCL that has them open. The caller holds the move's lock."""
        began, uid = host.boottime_s(), moving.log.begin.rank_uid
        membership = moving.log.record.communicators
        if membership is None:
            own = await self.members.gates.report(self._request(moving))
            if not any(process.rank_uid == uid for process in own.processes):
                return pb.DetachReply()
            if not self.members.gates.closed_for(moving.log.move):
                raise WrongState("the gates of the job are not closed", where=Where.SOURCE_RUNNING)
            membership = await self._learn(moving)
        await reach(Point.BEFORE_DETACH)
        await self.detach_all(moving, membership)
        processes = await self._processes(moving)
        await all_at_once(lambda each: ncclctl.close_devices(each, CLOSE_DEVICES_S), processes)
        await leftovers.must_be_none(processes)
        await reach(Point.DETACH)
        seconds = host.boottime_s() - began
        metrics.phase("detach", seconds)
        log.info(
            "took %d communicators down on %d nodes in %.1f s", len(membership), len(nodes_of(membership)), seconds
        )
        return pb.DetachReply(comms=len(membership), seconds=seconds)

    async def attach(self, moving: Moving, node: str) -> pb.AttachReply:
        """Builds them again, with the rank's copy on `node`. The caller holds the move's lock."""
        membership = moving.log.record.communicators
        if membership is None:
            return pb.AttachReply()
        return await self.build(moving, placed(membership, moving.log.begin.rank_uid, node), node)

    # ------------------------------------------------------------------ undo, with or without a driver

    async def put_back(self, moving: Moving) -> None:
        """ABORT stands and the rank runs here again, behind its gate: builds its communicators again on all members.

        After an error it is called again, for as long as it takes: meanwhile the gates stay closed. Only when a member has
        ended, or its node was declared dead, so that they can never be complete, the job continues without them and gets
        NCCL's errors.
        """
        membership = moving.log.record.communicators
        if not membership or moving.log.record.abandoned:
            return
        where = f"on {', '.join(nodes_of(membership))}; the gates stay closed until then"
        moving.waiting_for = moving.unbuilt or f"its communicators are being built again {where}"
        for again in (True, False):  # a short failure is retried once before it is reported
            try:
                # Those that were built with the target's copy already are taken down first; the others are down.
                await self.detach_all(moving, membership)
                ended = ended_since(await self.reports(moving, nodes_of(membership)), membership)
                wanted = {comm: members for comm, members in membership.items() if comm not in ended}
                await self.build(moving, wanted, self.node.config.node)
                await self._leave_down(moving, membership, ended)
                moving.unbuilt = ""
                return
            except RankGone as error:
                await self.give_up_building(moving, error.message)
                return
            except SnapshotError as error:
                kept = f"its communicators are not built again yet, and the gates stay closed: {error.message}"
                moving.waiting_for = moving.unbuilt = kept
                if moving.given_up:
                    await self.give_up_building(moving, moving.given_up)
                    return
                if not again:
                    raise type(error)(kept, remedy=error.advice, where=error.where) from error
                log.warning("building the communicators again: %s", error.message)

    async def give_up_building(self, moving: Moving, why: str) -> None:
        """A member has ended, or its node was declared dead: all communicators of the rank stay down. Gates open all the
        same, and the job gets errors."""
        membership = moving.log.record.communicators
        if not membership:  # a rank may have RDMA devices and no communicator
            return
        if not moving.log.record.abandoned:
            await self._take_down_where_possible(moving, membership)
        await self._abandon(moving, f"its communicators can never be built again: {why}")

    async def _take_down_where_possible(self, moving: Moving, membership: Membership) -> None:
        """A member that was attached with the target's copy would hang in its communicator, whose other members are gone,
        once its gate opens. One that is down gets errors. Each rank is asked for itself: its neighbour may have ended."""

        async def take_down(name: str) -> None:
            comms, uids = on_node(membership, name)
            if name != self.node.config.node and not await self._answers(moving, name):
                return  # a call that may take minutes is not for a node that is down
            for uid in uids:
                try:
                    await self.detach_on(moving, name, comms, [uid], self.limit_s(membership))
                except SnapshotError as error:
                    log.info("communicators of %s on %s were not taken down: %s", uid, name, error.message)

        await on_all(nodes_of(membership), take_down)

    async def _abandon(self, moving: Moving, why: str) -> None:
        """Journals that communicators which are down stay down: when the gates open, the job gets errors from these."""
        if why not in moving.failure:  # this may be repeated
            moving.failure = "; ".join(filter(None, (moving.failure, why)))
        log.error("rank %s: %s; the job continues without them", moving.log.begin.rank, why)
        await in_thread(moving.log.mark, moving.log.last_mark, abandoned=True, failure=moving.failure)

    async def _leave_down(self, moving: Moving, membership: Membership, ended: Membership) -> None:
        """Communicators that members have destroyed while they were down are not built again. The other members may destroy
        theirs as well; if they use it instead, they get errors. One that no member has any more leaves nothing to do."""
        left = {comm: members for comm, members in ended.items() if len(members) < len(membership[comm])}
        if left:
            named = "; ".join(
                f"communicator {comm} by {', '.join(f'{member.rank_uid} on {member.node}' for member in members[:3])}"
                for comm, members in sorted(left.items())
            )
            why = (
                f"destroyed while they were taken down, so that they are not built again for the other members: {named}"
            )
            await self._abandon(moving, f"{len(left)} communicators were {why}")

    async def must_be_dead(self, moving: Moving, name: str) -> None:
        """Raises WrongState unless a node has members of the communicators that are down, and does not answer."""
        begin, others = moving.log.begin, set(nodes_of(moving.log.record.communicators or {})) - {self.node.config.node}
        if name not in others:
            named = f"has none: {', '.join(sorted(others))} have" if others else "has none, nor has any other node"
            raise WrongState(
                f"move {begin.move} waits for no member of communicators on {name}: it {named}",
                where=where_of(moving.log),
            )
        if not await self._answers(moving, name):
            return
        raise WrongState(
            f"snapshotd on {name} answers: it is not dead, and the communicators are being built again",
            remedy=f"`migrator status {begin.move}` says what they wait for",
            where=where_of(moving.log),
        )

    async def _answers(self, moving: Moving, name: str) -> bool:
        try:
            async with self.client(moving, name) as client:
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ALIVE_S)
        except (Unreachable, Timeout):
            return False
        return True

    async def open_all(self, moving: Moving) -> None:
        """Sends every node the token that opens its gates. Best effort: a node that is not reached asks later."""
        outcome = moving.log.outcome
        if outcome is None or not self.members.gates.closed_for(moving.log.move):
            return
        token = rules.proof(moving.log.nonce, outcome.outcome.value, moving.log.move)
        abandoned = moving.log.known.abandoned
        request = pb.TokenRequest(move=moving.log.move, token=token, abandoned=abandoned)
        here = self.node.config.node

        async def tell(name: str) -> None:
            if name == here:
                await self.members.gates.open(request.move, request.token, here, abandoned=abandoned)
                return
            async with self.client(moving, name) as client:
                await client.gate.Open(request, timeout_s=OPEN_S)

        names = [here, *(node.name for node in moving.nodes if node.name != here)]
        for name, result in zip(names, await asyncio.gather(*map(tell, names), return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                log.info("node %s opens its gates once it has asked: %s", name, result)

    # ------------------------------------------------------------------ parts

    async def build(self, moving: Moving, membership: Membership, node: str) -> pb.AttachReply:
        """Builds these communicators, with the rank's copy on `node`."""
        began = host.boottime_s()
        await reach(Point.BEFORE_ATTACH)
        if node != self.node.config.node:
            ready = pb.AttachRequest(move=moving.log.move, rank_uids=[moving.log.begin.rank_uid])
            await self.attach_request(moving, node, ready, READY_S + GRACE_S)
        gpus = await self._gpus(moving, nodes_of(membership))
        ids = await self._new_ids(moving, membership)
        await on_all(
            nodes_of(membership),
            lambda name: self._attach_on(moving, name, membership, ids, gpus),
            lambda name: self._give_up_on(moving, name),
        )
        seconds = host.boottime_s() - began
        metrics.phase("reattach", seconds)
        log.info("built %d communicators on %d nodes in %.1f s", len(membership), len(nodes_of(membership)), seconds)
        return pb.AttachReply(comms=len(membership), seconds=seconds)

    async def _processes(self, moving: Moving) -> list[Process]:
        """The moving rank's processes that had communicators."""
        gates = self.members.gates.moving(moving.log.move)
        found = await in_thread(gate_processes.members, gates.log, [moving.log.begin.rank_uid])
        return [each.process for each in found]

    async def _learn(self, moving: Moving) -> Membership:
        """Every member of every communicator of the rank, from all nodes' reports; journalled."""
        begin = moving.log.begin
        names = [node.name for node in moving.nodes] or [self.node.config.node]
        answers = await asyncio.gather(*(self.report(moving, name) for name in names), return_exceptions=True)
        reports = {
            name: answer for name, answer in zip(names, answers, strict=True) if isinstance(answer, pb.GateReport)
        }
        silent = [f"{name}: {answer}" for name, answer in zip(names, answers, strict=True) if name not in reports]
        membership, problems = membership_of(reports, begin.rank_uid)
        if problems:
            raise Refused(f"nccl-communicators: {'; '.join([*problems[:5], *silent])}", where=Where.SOURCE_RUNNING)
        instances = {
            process.pid: process.instance
            for process in reports[self.node.config.node].processes
            if process.rank_uid == begin.rank_uid
        }
        await in_thread(
            moving.log.mark,
            Mark.BEGUN,
            communicators=membership,
            nccl_instances=list(instances.items()),
        )
        return membership

    async def report(self, moving: Moving, name: str) -> pb.GateReport:
        request = self._request(moving)
        if name == self.node.config.node:
            return await self.members.gates.report(request)
        async with self.client(moving, name) as client:
            return await client.gate.Report(request, timeout_s=REPORT_S)

    async def reports(self, moving: Moving, names: Sequence[str]) -> dict[str, pb.GateReport]:
        answers = await asyncio.gather(*(self.report(moving, name) for name in names))
        return dict(zip(names, answers, strict=True))

    async def detach_all(self, moving: Moving, membership: Membership) -> None:
        limit_s = self.limit_s(membership)
        await on_all(
            nodes_of(membership),
            lambda name: self.detach_on(moving, name, *on_node(membership, name), limit_s),
        )

    async def detach_on(
        self,
        moving: Moving,
        name: str,
        comms: Sequence[str],
        uids: Sequence[str],
        limit_s: float,
        *,
        close_devices: bool = False,
    ) -> None:
        request = pb.DetachRequest(move=moving.log.move, comms=comms, rank_uids=uids, timeout_s=limit_s)
        request.close_devices = close_devices
        if name == self.node.config.node:
            await self.members.detach(request, name)
            return
        async with self.client(moving, name) as client:
            await client.gate.Detach(request, timeout_s=limit_s + GRACE_S)

    async def _new_ids(self, moving: Moving, membership: Membership) -> dict[str, str]:
        """An id for each communicator, made by its member with the lowest rank."""

        async def make(comm: str) -> str:
            first = min(membership[comm], key=lambda member: member.rank)
            request = pb.NewIdRequest(move=moving.log.move, rank_uid=first.rank_uid, pid=first.pid, comm=comm)
            if first.node == self.node.config.node:
                return (await self.members.new_id(request, first.node)).unique_id
            async with self.client(moving, first.node) as client:
                return (await client.gate.NewId(request, timeout_s=NEW_ID_S + GRACE_S)).unique_id

        return {comm: await make(comm) for comm in sorted(membership)}

    async def _attach_on(
        self,
        moving: Moving,
        name: str,
        membership: Membership,
        ids: Mapping[str, str],
        gpus: Mapping[str, frozenset[str]],
    ) -> None:
        comms, uids = on_node(membership, name)
        limit_s = self.limit_s(membership)
        request = pb.AttachRequest(move=moving.log.move, rank_uids=uids, timeout_s=limit_s)
        for comm in comms:
            request.comms.add(comm=comm, unique_id=ids[comm], untried=untried(membership[comm], gpus))
        await self.attach_request(moving, name, request, limit_s + 2 * GRACE_S)

    async def attach_request(
        self, moving: Moving, name: str, request: pb.AttachRequest, timeout_s: float
    ) -> pb.AttachReply:
        if name == self.node.config.node:
            return await self.members.attach(request, name)
        async with self.client(moving, name) as client:
            return await client.gate.Attach(request, timeout_s=timeout_s)

    async def _gpus(self, moving: Moving, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """The GPUs of every rank on these nodes, by its uid."""

        async def ask(name: str) -> list[pb.Rank]:
            if name == self.node.config.node:
                return await ranks_of(self.node)
            async with self.client(moving, name) as client:
                return list((await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=LIST_S)).ranks)

        found: dict[str, frozenset[str]] = {}
        for ranks in await asyncio.gather(*map(ask, names)):
            for rank in ranks:
                if rank.place == pb.Rank.HERE:
                    found[rank.uid] = found.get(rank.uid, frozenset()) | frozenset(rank.gpus)
        return found

    async def _give_up_on(self, moving: Moving, name: str) -> None:
        """Best effort: a node that is not reached waits until its own deadline."""
        try:
            if name == self.node.config.node:
                await self.members.give_up(moving.log.move, name)
                return
            async with self.client(moving, name) as client:
                await client.gate.GiveUp(pb.MoveRequest(move=moving.log.move), timeout_s=GIVE_UP_S)
        except SnapshotError as error:
            log.info("node %s could not be told to give up: %s", name, error.message)

    def limit_s(self, membership: Membership) -> float:
        """How long these communicators may take to be taken down, or to be built again."""
        members = sum(map(len, membership.values()))
        return self.node.config.nccl_timeout_s + members * self.node.config.nccl_member_timeout_ms / 1000

    def client(self, moving: Moving, name: str) -> DaemonClient:
        begin = moving.log.begin
        endpoints = {node.name: node.endpoint for node in moving.nodes}
        endpoints.setdefault(begin.target_node, begin.target_endpoint)
        if name not in endpoints:
            raise WrongState(f"node {name} is not one of those that the driver named", where=Where.UNKNOWN)
        return self.node.client(name, endpoints[name])

    def _request(self, moving: Moving) -> pb.GateReportRequest:
        begin = moving.log.begin
        user_id = begin.user_id if begin.user_id >= 0 else self.node.ranks.here(begin.rank_uid).user_id
        return pb.GateReportRequest(move=begin.move, job=begin.job, user_id=user_id)


def down(moving: Moving) -> bool:
    """Whether communicators of the rank were taken down and not built again with the target's copy."""
    return moving.log.record.communicators is not None and not moving.log.record.attached


def must_be_attached(moving: Moving) -> None:
    """Raises WrongState unless the communicators are built: after COMMIT only a rank without them would be left."""
    if down(moving):
        raise WrongState("its communicators are not built again yet", where=Where.SOURCE_FROZEN)
