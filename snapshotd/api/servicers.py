"""The servicers of the wire: each call goes to the step that does it. Only the daemon imports this module."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as rpc
from snapshotd.api.access import caller
from snapshotd.keepers.listing import ranks_of
from snapshotd.keepers.relay import Relays
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.nccl.gates import GateSteps
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.peers.steps import PeerSteps
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.runtime.blocking import in_thread

Context = grpc.aio.ServicerContext[Any, Any]
DescribeMove = Callable[[MoveLog], pb.MoveRecord]


class Describe(Protocol):
    """Describes this node; its GPUs as they were up to a second ago, unless `fresh`."""

    async def __call__(self, *, fresh: bool) -> pb.NodeInfo: ...


class NodeServicer(rpc.NodeServicer):
    def __init__(self, node: Node, gates: GateSteps, describe: Describe, describe_move: DescribeMove) -> None:
        self.node, self.gates = node, gates
        self.describe, self.describe_move = describe, describe_move

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.NodeInfo:
        return await self.describe(fresh=False)

    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        return pb.ListRanksReply(ranks=await ranks_of(self.node))

    async def ListMoves(self, request: pb.ListMovesRequest, context: Context) -> pb.ListMovesReply:
        journal = self.node.journal
        gates = await in_thread(self.gates.closed, request.move)
        if request.move:
            known = journal.find(request.move) if gates else journal.get(request.move)
            logs = [known] if known else []
        else:
            logs = journal.all()
        return pb.ListMovesReply(moves=[self.describe_move(move_log) for move_log in logs], gates=gates)


class SourceServicer(rpc.SourceServicer):
    def __init__(self, steps: SourceSteps) -> None:
        self.steps = steps

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        return await self.steps.inspect(request)

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        return await self.steps.begin(request)

    async def PrepareDevice(self, request: pb.MoveRequest, context: Context) -> pb.PrepareDeviceReply:
        return await self.steps.prepare_device(request.move)

    async def Detach(self, request: pb.MoveRequest, context: Context) -> pb.DetachReply:
        return await self.steps.detach(request.move)

    async def Freeze(self, request: pb.MoveRequest, context: Context) -> pb.FreezeReply:
        return await self.steps.freeze(request.move)

    async def Stream(self, request: pb.MoveRequest, context: Context) -> AsyncIterator[pb.Progress]:
        async for progress in self.steps.stream(request.move):
            yield progress

    async def Attach(self, request: pb.MoveRequest, context: Context) -> pb.AttachReply:
        return await self.steps.attach(request.move)

    async def Renew(self, request: pb.MoveRequest, context: Context) -> pb.RenewReply:
        return await self.steps.renew(request.move)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.Outcome:
        return await self.steps.commit(request.move, request.held_receipt)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.Outcome:
        return await self.steps.abort(request.move, request.reason, str(caller(context)))

    async def Release(self, request: pb.MoveRequest, context: Context) -> pb.ReleaseReply:
        return await self.steps.release(request.move, request.pause_s)

    async def GetOutcome(self, request: pb.MoveRequest, context: Context) -> pb.Outcome:
        return await self.steps.outcome(request.move)

    async def DeclareTargetDead(self, request: pb.DeclareRequest, context: Context) -> pb.Outcome:
        return await self.steps.declare_target_dead(request.move, f"{request.declared_by} ({caller(context)})")


class TargetServicer(rpc.TargetServicer):
    def __init__(self, steps: TargetSteps, describe: Describe) -> None:
        self.steps, self.describe = steps, describe

    async def Examine(self, request: pb.ExamineRequest, context: Context) -> pb.ExamineReply:
        checks = await self.steps.examine(request.facts, await self.describe(fresh=True), request.gpu)
        return pb.ExamineReply(
            checks=checks + await in_thread(connections.examine, list(request.rewires), request.facts.rank.uid)
        )

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        return await self.steps.prepare(request)

    async def OpenImageChannel(self, request: pb.OpenImageChannelRequest, context: Context) -> pb.OpenImageChannelReply:
        return await self.steps.open_image_channel(request.move, caller(context).name)

    async def OpenDeviceChannel(
        self, request: pb.OpenDeviceChannelRequest, context: Context
    ) -> pb.OpenDeviceChannelReply:
        return await self.steps.open_device_channel(request, caller(context).name)

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealReply:
        return await self.steps.seal(request, caller(context).name)

    async def Restore(self, request: pb.MoveRequest, context: Context) -> pb.RestoreReply:
        return await self.steps.restore(request.move)

    async def Activate(self, request: pb.TokenRequest, context: Context) -> pb.ActivateReply:
        return await self.steps.activate(request.move, request.token)

    async def Discard(self, request: pb.TokenRequest, context: Context) -> pb.DiscardReply:
        return await self.steps.discard(request.move, request.token)

    async def GetCopy(self, request: pb.MoveRequest, context: Context) -> pb.Copy:
        return await self.steps.copy_state(request.move)

    async def DeclareSourceDead(self, request: pb.DeclareRequest, context: Context) -> pb.ActivateReply:
        return await self.steps.declare_source_dead(request.move, f"{request.declared_by} ({caller(context)})")


class PeerServicer(rpc.PeerServicer):
    def __init__(self, steps: PeerSteps, forwarding: Forwarding) -> None:
        self.steps, self.forwarding = steps, forwarding

    async def InspectConnections(
        self, request: pb.InspectConnectionsRequest, context: Context
    ) -> pb.InspectConnectionsReply:
        return pb.InspectConnectionsReply(checks=await self.steps.inspect_connections(list(request.rewires)))

    async def SuspendTimeouts(self, request: pb.RepointRequest, context: Context) -> pb.SuspendTimeoutsReply:
        return await self.steps.suspend_timeouts(request)

    async def Repoint(self, request: pb.RepointRequest, context: Context) -> pb.RepointReply:
        return await self.steps.repoint(request)

    async def Settle(self, request: pb.TokenRequest, context: Context) -> pb.SettleReply:
        return await self.steps.settle(request.move, request.token)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardReply:
        return await self.forwarding.accept(request, caller(context).name)

    async def ConfirmDeparture(self, request: pb.DepartureRequest, context: Context) -> pb.DepartureReply:
        return await self.forwarding.departures.confirm(request)


class GateServicer(rpc.GateServicer):
    def __init__(self, gates: GateSteps, members: Members) -> None:
        self.gates, self.members = gates, members

    async def Close(self, request: pb.MoveDescription, context: Context) -> pb.GateReport:
        return await self.gates.close(request)

    async def Report(self, request: pb.GateReportRequest, context: Context) -> pb.GateReport:
        return await self.gates.report(request)

    async def SetTargets(self, request: pb.SetTargetsRequest, context: Context) -> pb.GateReport:
        return await self.gates.set_targets(request)

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachReply:
        return await self.members.detach(request, caller(context).name)

    async def NewId(self, request: pb.NewIdRequest, context: Context) -> pb.NewIdReply:
        return await self.members.new_id(request, caller(context).name)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        return await self.members.attach(request, caller(context).name)

    async def GiveUp(self, request: pb.MoveRequest, context: Context) -> pb.GiveUpReply:
        return await self.members.give_up(request.move, caller(context).name)

    async def Open(self, request: pb.TokenRequest, context: Context) -> pb.OpenReply:
        return await self.gates.open(request.move, request.token, caller(context).name)


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
