"""The daemon: the servicers of the wire, and the keepers' comings and goings, each handed to the operation that does it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as rpc
from snapshotd.api.access import caller
from snapshotd.api.errors import SnapshotError
from snapshotd.config import Config
from snapshotd.cuda.driver import Gpus
from snapshotd.keepers.adoption import Adoption
from snapshotd.keepers.listener import KeeperLinks
from snapshotd.keepers.listing import ranks_of
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.keepers.relay import Relays
from snapshotd.moves.carry import Carry
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.nccl.gates import GateOps
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.node import Node, where_of
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.peers.steps import PeerOps
from snapshotd.moves.source.steps import SourceOps
from snapshotd.moves.target.steps import TargetOps
from snapshotd.net import addresses
from snapshotd.proc import host
from snapshotd.runtime import faults, metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.grpc_channel import push_handler
from snapshotd.transport.image.store import ImageStore

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_steps: set[asyncio.Task[Any]] = set()


async def whole(step: Coroutine[Any, Any, T]) -> T:
    """A step that changes something is done to its end, also when its caller hangs up or runs out of time: gRPC would cancel
    it anywhere in between."""
    task = asyncio.create_task(step)
    _steps.add(task)
    task.add_done_callback(_steps.discard)
    return await asyncio.shield(task)


class Daemon:
    """Everything behind the server's sockets."""

    def __init__(self, config: Config) -> None:
        faults.arm(config.run_dir)
        store = ImageStore(config.image_dir)
        carry = Carry(config.state_dir, config.carry_paths)
        self.gpus = Gpus(config.gpu_library_dir)
        self.node = Node(
            config, Journal(config.state_dir), Ranks(config.state_dir), store, carry, self.gpus, self._lost
        )
        self.relays = Relays(self.node)
        self.peer = PeerOps(self.node)
        self.gates = GateOps(self.node)
        self.members = Members(self.gates, lambda move: self.target.held(move))
        self.source = SourceOps(self.node, self.peer.pending, Communicators(self.node, self.members))
        self.forwarding = Forwarding(self.node, self.source.leaving.forwarded)
        self.target = TargetOps(self.node, self.relays, self.forwarding)
        self.adoption = Adoption(self.node, self.source, self.target, self.relays, self.forwarding)
        self.keepers = KeeperLinks(config.keeper_socket, self.adoption.adopt, self.adoption.events())
        metrics.watch(
            ranks=lambda: sum(1 for entry in self.node.ranks.all() if not entry.away_node),
            image_bytes=lambda: store.held_bytes(),
        )

    async def _lost(self, entry: RankEntry) -> None:
        await self.adoption.lost(entry)

    async def start(self, server: grpc.aio.Server) -> None:
        """Registers the servicers and takes up what an earlier life left unfinished."""
        rpc.add_NodeServicer_to_server(NodeServicer(self), server)
        rpc.add_SourceServicer_to_server(SourceServicer(self.source), server)
        rpc.add_TargetServicer_to_server(TargetServicer(self), server)
        rpc.add_PeerServicer_to_server(PeerServicer(self.peer, self.forwarding), server)
        rpc.add_GateServicer_to_server(GateServicer(self.gates, self.members), server)
        rpc.add_HomeServicer_to_server(HomeServicer(self.relays), server)

        async def authorise(context: Context, move: str) -> None:
            self.target.authorise_source(move, caller(context).name)
            await faults.reach(faults.Point.RECEIVING)

        server.add_generic_rpc_handlers((push_handler(self.node.store, authorise),))
        self.source.adopt_journal()
        self.peer.adopt_journal()
        await self.target.adopt_journal()
        await self.members.adopt_copies()
        self.gates.adopt_journal()
        await in_thread(self._sweep_filters)
        await self.adoption.sweep()  # before any settling: a dead keeper ends a move
        self.source.settle_all()
        await self.keepers.start()
        self._recalling = asyncio.create_task(self._recall_forwardings(), name="recall forwardings")

    def _sweep_filters(self) -> None:
        """No filter outlives its move, whatever killed the daemon that should have dropped it."""
        unsettled = [moving.log for ops in (self.source, self.target, self.peer) for moving in ops.moves.values()]
        tables = {table for move_log in unsettled for table in connections.tables_of(move_log)}
        try:
            connections.sweep(tables)
        except SnapshotError as error:  # a machine without packet filters has none left either
            log.info("filters were not looked for: %s", error.message)

    async def _recall_forwardings(self) -> None:
        """Ranks that are here may have moved on without somebody having heard; others may have ended."""
        for entry in self.node.ranks.all():
            if entry.role == "guest" and not entry.moving:
                self.forwarding.publish(entry)
        await self.forwarding.recall()

    async def stop(self, grace_s: float) -> None:
        """Hands over cleanly: a move that has no outcome is undone now, so that no rank waits frozen for the next life."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for moving in list(self.source.moves.values()):
                    if moving.log.outcome is None:
                        with contextlib.suppress(SnapshotError):
                            await self.source.abort(moving.log.move, "the source daemon was stopped", "source")
        for ops in (self.source, self.target, self.peer, self.gates):
            for moving in ops.moves.values():
                if moving.settling is not None:
                    moving.settling.cancel()
        self._recalling.cancel()
        await self.adoption.stop()
        await in_thread(self.target.bulk_receivers.close_all)
        await self.target.inlets.close_all()
        self.forwarding.stop()
        await self.relays.stop()
        await self.keepers.stop()
        await self.gpus.close()

    async def info(self, *, fresh: bool = False) -> pb.NodeInfo:
        """This node as others see it; its GPUs as they were up to a second ago, unless `fresh`."""
        config = self.node.config
        if fresh:
            await in_thread(self.node.store.dropped)
        held = await in_thread(self.node.store.held_bytes)
        running = [moving for ops in (self.source, self.target) for moving in ops.moves.values()]
        inventory = await self.gpus.inventory(fresh=fresh)
        return pb.NodeInfo(
            name=config.node,
            endpoint=config.advertise,
            version=host.DAEMON_VERSION,
            boot_id=host.boot_id(),
            kernel=host.kernel(),
            architecture=host.architecture(),
            criu_version=config.criu_version,
            memory_available_bytes=host.memory_available_bytes(),
            image_capacity_bytes=await in_thread(self.node.store.capacity_bytes),
            image_held_bytes=held,
            ranks=sum(1 for entry in self.node.ranks.all() if not entry.away_node),
            moves_running=sum(1 for moving in running if not moving.log.ended_unix_s),
            cpu_features=host.cpu_features(),
            addresses=await in_thread(addresses.of_this_node),
            gpus=self.target.with_reservations(inventory.gpus),
            driver_version=inventory.driver_version,
            gpu_problem=inventory.problem,
        )

    def move_record(self, move_log: MoveLog) -> pb.MoveRecord:
        begin, outcome = move_log.begin, move_log.outcome
        moving = (self.source if begin.role == "source" else self.target).moves.get(begin.move)
        ended = move_log.ended_unix_s
        return pb.MoveRecord(
            move=begin.move,
            role=begin.role,
            rank_uid=begin.rank_uid,
            job=begin.job,
            rank=begin.rank,
            source_node=begin.source_node,
            source_endpoint=begin.source_endpoint,
            target_node=begin.target_node,
            target_endpoint=begin.target_endpoint,
            mark=move_log.last_mark,
            outcome=pb.OutcomeKind.Value(outcome.outcome.value) if outcome else pb.UNDECIDED,
            reason=outcome.reason if outcome else "",
            decided_by=outcome.decided_by if outcome else "",
            begun_unix_s=begin.begun_unix_s,
            ended_unix_s=ended,
            where=where_of(move_log).value,
            bytes=move_log.record.sent_bytes,
            pause_s=move_log.record.pause_s,
            waiting_for="" if ended or moving is None else moving.waiting_for,
        )


class NodeServicer(rpc.NodeServicer):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.NodeInfo:
        return await self.daemon.info()

    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        return pb.ListRanksReply(ranks=await ranks_of(self.daemon.node))

    async def ListMoves(self, request: pb.ListMovesRequest, context: Context) -> pb.ListMovesReply:
        journal = self.daemon.node.journal
        gates = await in_thread(self.daemon.gates.closed, request.move)
        if request.move:
            known = journal.find(request.move) if gates else journal.get(request.move)
            logs = [known] if known else []
        else:
            logs = journal.all()
        return pb.ListMovesReply(moves=[self.daemon.move_record(move_log) for move_log in logs], gates=gates)


class SourceServicer(rpc.SourceServicer):
    def __init__(self, ops: SourceOps) -> None:
        self.ops = ops

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        return await self.ops.inspect(request)

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        return await whole(self.ops.begin(request))

    async def PrepareDevice(self, request: pb.MoveRequest, context: Context) -> pb.PrepareDeviceReply:
        return await whole(self.ops.prepare_device(request.move))

    async def Detach(self, request: pb.MoveRequest, context: Context) -> pb.DetachReply:
        return await whole(self.ops.detach(request.move))

    async def Freeze(self, request: pb.MoveRequest, context: Context) -> pb.FreezeReply:
        return await whole(self.ops.freeze(request.move))

    async def Stream(self, request: pb.MoveRequest, context: Context) -> AsyncIterator[pb.Progress]:
        async for progress in self.ops.stream(request.move):
            yield progress

    async def Attach(self, request: pb.MoveRequest, context: Context) -> pb.AttachReply:
        return await whole(self.ops.attach(request.move))

    async def Renew(self, request: pb.MoveRequest, context: Context) -> pb.RenewReply:
        return await self.ops.renew(request.move)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.Outcome:
        return await whole(self.ops.commit(request.move, request.held_receipt))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.Outcome:
        return await whole(self.ops.abort(request.move, request.reason, str(caller(context))))

    async def Release(self, request: pb.MoveRequest, context: Context) -> pb.ReleaseReply:
        return await whole(self.ops.release(request.move, request.pause_s))

    async def GetOutcome(self, request: pb.MoveRequest, context: Context) -> pb.Outcome:
        return await self.ops.outcome(request.move)

    async def DeclareTargetDead(self, request: pb.DeclareRequest, context: Context) -> pb.Outcome:
        return await whole(self.ops.declare_target_dead(request.move, f"{request.declared_by} ({caller(context)})"))


class TargetServicer(rpc.TargetServicer):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.ops = daemon, daemon.target

    async def Examine(self, request: pb.ExamineRequest, context: Context) -> pb.ExamineReply:
        checks = await self.ops.examine(request.facts, await self.daemon.info(fresh=True), request.gpu)
        return pb.ExamineReply(
            checks=checks + await in_thread(connections.examine, list(request.rewires), request.facts.rank.uid)
        )

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        return await whole(self.ops.prepare(request))

    async def OpenImageChannel(self, request: pb.OpenImageChannelRequest, context: Context) -> pb.OpenImageChannelReply:
        return await whole(self.ops.open_image_channel(request.move, caller(context).name))

    async def OpenDeviceChannel(
        self, request: pb.OpenDeviceChannelRequest, context: Context
    ) -> pb.OpenDeviceChannelReply:
        return await whole(self.ops.open_device_channel(request, caller(context).name))

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealReply:
        return await whole(self.ops.seal(request, caller(context).name))

    async def Restore(self, request: pb.MoveRequest, context: Context) -> pb.RestoreReply:
        return await whole(self.ops.restore(request.move))

    async def Activate(self, request: pb.TokenRequest, context: Context) -> pb.ActivateReply:
        return await whole(self.ops.activate(request.move, request.token))

    async def Discard(self, request: pb.TokenRequest, context: Context) -> pb.DiscardReply:
        return await whole(self.ops.discard(request.move, request.token))

    async def GetCopy(self, request: pb.MoveRequest, context: Context) -> pb.Copy:
        return await self.ops.copy_state(request.move)

    async def DeclareSourceDead(self, request: pb.DeclareRequest, context: Context) -> pb.ActivateReply:
        return await whole(self.ops.declare_source_dead(request.move, f"{request.declared_by} ({caller(context)})"))


class PeerServicer(rpc.PeerServicer):
    def __init__(self, ops: PeerOps, forwarding: Forwarding) -> None:
        self.ops, self.forwarding = ops, forwarding

    async def InspectConnections(
        self, request: pb.InspectConnectionsRequest, context: Context
    ) -> pb.InspectConnectionsReply:
        return pb.InspectConnectionsReply(checks=await self.ops.inspect_connections(list(request.rewires)))

    async def SuspendTimeouts(self, request: pb.RepointRequest, context: Context) -> pb.SuspendTimeoutsReply:
        return await whole(self.ops.suspend_timeouts(request))

    async def Repoint(self, request: pb.RepointRequest, context: Context) -> pb.RepointReply:
        return await whole(self.ops.repoint(request))

    async def Settle(self, request: pb.TokenRequest, context: Context) -> pb.SettleReply:
        return await whole(self.ops.settle(request.move, request.token))

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardReply:
        return await whole(self.forwarding.set(request, caller(context).name))


class GateServicer(rpc.GateServicer):
    def __init__(self, gates: GateOps, members: Members) -> None:
        self.gates, self.members = gates, members

    async def Close(self, request: pb.MoveDescription, context: Context) -> pb.GateReport:
        return await whole(self.gates.close(request))

    async def Report(self, request: pb.GateReportRequest, context: Context) -> pb.GateReport:
        return await self.gates.report(request)

    async def SetTargets(self, request: pb.SetTargetsRequest, context: Context) -> pb.GateReport:
        return await whole(self.gates.set_targets(request))

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachReply:
        return await whole(self.members.detach(request, caller(context).name))

    async def NewId(self, request: pb.NewIdRequest, context: Context) -> pb.NewIdReply:
        return await whole(self.members.new_id(request, caller(context).name))

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        return await whole(self.members.attach(request, caller(context).name))

    async def GiveUp(self, request: pb.MoveRequest, context: Context) -> pb.GiveUpReply:
        return await self.members.give_up(request.move, caller(context).name)

    async def Open(self, request: pb.TokenRequest, context: Context) -> pb.OpenReply:
        return await whole(self.gates.open(request.move, request.token, caller(context).name))


class HomeServicer(rpc.HomeServicer):
    def __init__(self, relays: Relays) -> None:
        self.relays = relays

    async def Relay(
        self, request_iterator: AsyncIterator[pb.RelayFrame], context: Context
    ) -> AsyncIterator[pb.RelayFrame]:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        async with contextlib.aclosing(self.relays.serve(request_iterator, metadata, caller(context).name)) as frames:
            async for frame in frames:
                yield frame
