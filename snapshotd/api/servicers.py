"""The servicers: each call that the network process passes on goes to the step that does it. Only the daemon imports this."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from snapshotd.api import signs_of_life
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, SnapshotError
from snapshotd.diagnosis.run import Diagnosis
from snapshotd.health.monitor import Monitor
from snapshotd.keepers.listing import ranks_of
from snapshotd.keepers.relay import Relays
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.jobs.succession import Succession
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.nccl.gates import GateSteps
from snapshotd.moves.nccl.members import Members
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.peers.steps import PeerSteps
from snapshotd.moves.rules import Outcome
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.steps import Steps
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.network.dispatch import Context
from snapshotd.progress.sampler import Sampler
from snapshotd.runtime import spans
from snapshotd.runtime.blocking import in_thread

#: How long another daemon may take to answer `FindNode`'s question.
FIND_S = 5.0
#: Moves whose timings are read from the disk for one question.
MOST_TIMINGS = 32
DescribeMove = Callable[[MoveLog], pb.MoveRecord]


class Describe(Protocol):
    """Describes this node; its GPUs as they were up to a second ago, unless `fresh`."""

    async def __call__(self, *, fresh: bool) -> pb.NodeInfo: ...


def known_to_peer(steps: Iterable[Steps], move: str) -> pb.OutcomeKind.ValueType:
    """The outcome of a move that this node knows although it is neither its source nor its target."""
    known = [found.outcome for each in steps if (found := each.journal.find(check_move_id(move))) is not None]
    decided = {outcome.outcome for outcome in known if outcome is not None}
    if Outcome.COMMIT in decided:
        return pb.COMMIT
    return pb.ABORT if decided else pb.UNDECIDED


def add_timings(described: Sequence[pb.MoveRecord], logs: Sequence[MoveLog]) -> None:
    """Adds what the pauses of moves consisted of, which is only on the disk. Blocking."""
    for one, move_log in zip(described, logs, strict=True):
        with contextlib.suppress(Damaged):
            if (timing := move_log.whole().timing) is not None:
                one.timing.CopyFrom(timing)


def spans_of(move: str) -> pb.GetSpansReply:
    """What this daemon has recorded of a move."""
    recorded, now_s = spans.of(move), spans.now_s()
    numbers = {id(one): number for number, one in enumerate(recorded.spans, 1)}
    return pb.GetSpansReply(
        now_s=now_s,
        left_out=recorded.left_out,
        spans=[
            pb.Span(
                name=one.name,
                began_s=one.began_s,
                seconds=(one.ended_s or now_s) - one.began_s,
                bytes=one.bytes,
                call=one.call,
                failed=one.failed,
                unfinished=not one.ended_s,
                parent=numbers.get(id(one.parent), 0),
            )
            for one in recorded.spans
        ],
    )


class NodeServicer:
    def __init__(
        self,
        node: Node,
        peers: PeerSteps,
        gates: GateSteps,
        describe: Describe,
        describe_move: DescribeMove,
        images: StoredImages,
        diagnosis: Diagnosis,
        health: Monitor,
        progress: Sampler,
    ) -> None:
        self.node, self.peers, self.gates, self.images = node, peers, gates, images
        self.describe, self.describe_move = describe, describe_move
        self.diagnosis, self.health, self.progress = diagnosis, health, progress

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.NodeInfo:
        return await self.describe(fresh=False)

    async def ListRanks(self, request: pb.ListRanksRequest, context: Context) -> pb.ListRanksReply:
        ranks = await ranks_of(self.node, brief=request.brief)
        return pb.ListRanksReply(ranks=[*ranks, *await self.images.ranks()])

    async def ListMoves(self, request: pb.ListMovesRequest, context: Context) -> pb.ListMovesReply:
        if request.as_peer:
            return pb.ListMovesReply(known_to_peer=known_to_peer((self.peers, self.gates), request.move))
        journal = self.node.journal
        gates = await in_thread(self.gates.closed, request.move)
        if request.move:
            known = journal.find(request.move) if gates else journal.get(request.move)
            logs = [known] if known else []
        elif request.timings:
            logs = [one for one in journal.all() if one.begin.role == "source" and one.known.pause_s][-MOST_TIMINGS:]
        else:
            logs = journal.all()
        moves = [self.describe_move(move_log) for move_log in logs]
        if request.timings:
            await in_thread(add_timings, moves, logs)
        return pb.ListMovesReply(moves=moves, gates=gates)

    async def FindNode(self, request: pb.FindNodeRequest, context: Context) -> pb.FindNodeReply:
        try:
            async with self.node.client(request.name, request.endpoint) as client:
                await client.node.GetNode(pb.GetNodeRequest(), timeout_s=FIND_S)
        except SnapshotError as error:
            signs = await in_thread(signs_of_life.look, request.endpoint)
            return pb.FindNodeReply(found=f"its daemon does not answer ({error.headline}); {signs.words}")
        return pb.FindNodeReply(daemon_answers=True, found="its daemon answers")

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseReply:
        return await self.diagnosis.run(request, lambda: self.describe(fresh=False))

    async def OpenProbe(self, request: pb.OpenProbeRequest, context: Context) -> pb.OpenProbeReply:
        return await self.diagnosis.open_probe(request)

    async def GetHealth(self, request: pb.GetHealthRequest, context: Context) -> pb.Health:
        return await self.health.since(request)

    async def ClearAlarms(self, request: pb.ClearAlarmsRequest, context: Context) -> pb.ClearAlarmsReply:
        return await self.health.clear(request, str(context.caller))

    async def GetProgress(self, request: pb.GetProgressRequest, context: Context) -> pb.NodeProgress:
        return self.progress.since(request)

    async def GetSpans(self, request: pb.GetSpansRequest, context: Context) -> pb.GetSpansReply:
        return spans_of(check_move_id(request.move))


class SourceServicer:
    def __init__(self, steps: SourceSteps, images: StoredImages) -> None:
        self.steps, self.images = steps, images

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        return await self.steps.inspect(request)

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        return await self.steps.begin(request)

    async def PrepareDevice(self, request: pb.MoveRequest, context: Context) -> pb.PrepareDeviceReply:
        return await self.steps.prepare_device(request.move, request.precopy_percent)

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
        return await self.steps.abort(request.move, request.reason, str(context.caller))

    async def Release(self, request: pb.MoveRequest, context: Context) -> pb.ReleaseReply:
        return await self.steps.release(request.move, request.pause_s, request.timing)

    async def GetOutcome(self, request: pb.MoveRequest, context: Context) -> pb.Outcome:
        return await self.steps.outcome(request.move)

    async def DeclareTargetDead(self, request: pb.DeclareRequest, context: Context) -> pb.Outcome:
        return await self.steps.declare_target_dead(request.move, f"{request.declared_by} ({context.caller})")

    async def DeclareMemberDead(self, request: pb.DeclareMemberRequest, context: Context) -> pb.Outcome:
        by = f"{request.declared_by} ({context.caller})"
        return await self.steps.declare_member_dead(request.move, request.node, by, only_check=request.only_check)

    async def GetImage(self, request: pb.MoveRequest, context: Context) -> pb.StoredImage:
        return await self.images.describe(request.move)

    async def Send(self, request: pb.SendRequest, context: Context) -> AsyncIterator[pb.Progress]:
        async for progress in self.images.send(request):
            yield progress

    async def DropImage(self, request: pb.DropImageRequest, context: Context) -> pb.DropImageReply:
        caller = context.caller
        by_node = caller.name if caller.role == "node" else ""
        return await self.images.drop(
            request.image, request.reason, by_node, given_up=request.given_up, ended=request.ended
        )

    async def Hurry(self, request: pb.MoveRequest, context: Context) -> pb.HurryReply:
        return pb.HurryReply(copying=self.images.hurry(request.move))


class TargetServicer:
    def __init__(self, steps: TargetSteps, describe: Describe) -> None:
        self.steps, self.describe = steps, describe

    async def Examine(self, request: pb.ExamineRequest, context: Context) -> pb.ExamineReply:
        with spans.span("describe this node"):
            info = await self.describe(fresh=True)
        with spans.span("check"):
            checks = await self.steps.examine(request, info)
        with spans.span("check listeners"):
            more = await in_thread(connections.examine, list(request.rewires), request.facts.rank.uid)
        return pb.ExamineReply(checks=checks + more)

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        return await self.steps.prepare(request)

    async def OpenImageChannel(self, request: pb.OpenImageChannelRequest, context: Context) -> pb.OpenImageChannelReply:
        return await self.steps.open_image_channel(request, context.caller.name)

    async def OpenDeviceChannel(
        self, request: pb.OpenDeviceChannelRequest, context: Context
    ) -> pb.OpenDeviceChannelReply:
        return await self.steps.open_device_channel(request, context.caller.name)

    async def AllocateDeviceMemory(
        self, request: pb.AllocateDeviceMemoryRequest, context: Context
    ) -> pb.AllocateDeviceMemoryReply:
        return await self.steps.allocate_device_memory(request, context.caller.name)

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealReply:
        return await self.steps.seal(request, context.caller.name)

    async def Restore(self, request: pb.MoveRequest, context: Context) -> pb.RestoreReply:
        return await self.steps.restore(request.move)

    async def Activate(self, request: pb.TokenRequest, context: Context) -> pb.ActivateReply:
        return await self.steps.activate(request.move, request.token, abandoned=request.abandoned)

    async def Discard(self, request: pb.TokenRequest, context: Context) -> pb.DiscardReply:
        asker = context.caller
        return await self.steps.discard(request.move, request.token, "" if asker.role == "node" else str(asker))

    async def GetCopy(self, request: pb.MoveRequest, context: Context) -> pb.Copy:
        return await self.steps.copy_state(request.move, context.caller.name)

    async def DeclareSourceDead(self, request: pb.DeclareRequest, context: Context) -> pb.ActivateReply:
        return await self.steps.declare_source_dead(request.move, f"{request.declared_by} ({context.caller})")


class PeerServicer:
    def __init__(self, steps: PeerSteps, forwarding: Forwarding) -> None:
        self.steps, self.forwarding = steps, forwarding

    async def InspectConnections(
        self, request: pb.InspectConnectionsRequest, context: Context
    ) -> pb.InspectConnectionsReply:
        return pb.InspectConnectionsReply(checks=await self.steps.inspect_connections(request))

    async def SuspendTimeouts(self, request: pb.RepointRequest, context: Context) -> pb.SuspendTimeoutsReply:
        return await self.steps.suspend_timeouts(request)

    async def Hold(self, request: pb.RepointRequest, context: Context) -> pb.HoldReply:
        return await self.steps.hold(request)

    async def Repoint(self, request: pb.RepointRequest, context: Context) -> pb.RepointReply:
        return await self.steps.repoint(request)

    async def Settle(self, request: pb.TokenRequest, context: Context) -> pb.SettleReply:
        return await self.steps.settle(request.move, request.token)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardReply:
        return await self.forwarding.accept(request, context.caller.name)

    async def ConfirmDeparture(self, request: pb.DepartureRequest, context: Context) -> pb.DepartureReply:
        return await self.forwarding.departures.confirm(request)


class GateServicer:
    def __init__(self, gates: GateSteps, members: Members) -> None:
        self.gates, self.members = gates, members

    async def Close(self, request: pb.MoveDescription, context: Context) -> pb.GateReport:
        return await self.gates.close(request)

    async def Report(self, request: pb.GateReportRequest, context: Context) -> pb.GateReport:
        return await self.gates.report(request)

    async def SetTargets(self, request: pb.SetTargetsRequest, context: Context) -> pb.GateReport:
        return await self.gates.set_targets(request)

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachReply:
        return await self.members.detach(request, context.caller.name)

    async def NewId(self, request: pb.NewIdRequest, context: Context) -> pb.NewIdReply:
        return await self.members.new_id(request, context.caller.name)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        return await self.members.attach(request, context.caller.name)

    async def GiveUp(self, request: pb.MoveRequest, context: Context) -> pb.GiveUpReply:
        return await self.members.give_up(request.move, context.caller.name)

    async def Open(self, request: pb.TokenRequest, context: Context) -> pb.OpenReply:
        return await self.gates.open(request.move, request.token, context.caller.name, abandoned=request.abandoned)


class JobServicer:
    def __init__(self, steps: JobSteps, endings: Endings, succession: Succession) -> None:
        self.steps, self.endings, self.succession = steps, endings, succession

    async def Begin(self, request: pb.BeginJobRequest, context: Context) -> pb.BeginJobReply:
        return await self.steps.begin(request)

    async def Renew(self, request: pb.MoveRequest, context: Context) -> pb.RenewReply:
        return await self.steps.renew(request.move)

    async def Detach(self, request: pb.MoveRequest, context: Context) -> pb.DetachReply:
        return await self.steps.detach(request.move)

    async def Attach(self, request: pb.MoveRequest, context: Context) -> pb.AttachReply:
        return await self.steps.attach(request.move)

    async def Commit(self, request: pb.MoveRequest, context: Context) -> pb.Outcome:
        return await self.steps.commit(request.move)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.Outcome:
        return await self.steps.abort(request.move, request.reason, str(context.caller))

    async def GetOutcome(self, request: pb.MoveRequest, context: Context) -> pb.Outcome:
        return await self.steps.outcome(request.move, request.part)

    async def Drop(self, request: pb.DropJobRequest, context: Context) -> pb.DropImageReply:
        return await self.steps.drop(request.move, f"{request.reason} ({context.caller})", list(request.lost_nodes))

    async def List(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsReply:
        return await self.steps.listed(rollbacks_only=request.rollbacks_only)

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.Outcome:
        return await self.steps.rollback(request, str(context.caller))

    async def MayRun(self, request: pb.MayRunRequest, context: Context) -> pb.MayRunReply:
        return await self.steps.may_run(request)

    async def EndRanks(self, request: pb.EndRanksRequest, context: Context) -> pb.EndRanksReply:
        return await self.endings.end(request, context.caller.name)

    async def ListKept(self, request: pb.ListKeptRequest, context: Context) -> pb.ListKeptReply:
        return await self.succession.kept()

    async def HandOver(self, request: pb.HandOverRequest, context: Context) -> pb.Outcome:
        return await self.succession.hand_over(request.record, request.successor, str(context.caller))

    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.Outcome:
        return await self.succession.adopt(request, str(context.caller))

    async def Succeed(self, request: pb.SucceedRequest, context: Context) -> pb.SucceedReply:
        return await self.succession.succeed(request, str(context.caller))

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseReply:
        return await self.steps.promises.ask(request, context.caller.name)


class HomeServicer:
    def __init__(self, relays: Relays) -> None:
        self.relays = relays

    async def Relay(
        self, request_iterator: AsyncIterator[pb.RelayFrame], context: Context
    ) -> AsyncIterator[pb.RelayFrame]:
        frames_of = self.relays.serve(request_iterator, dict(context.metadata), context.caller.name)
        async with contextlib.aclosing(frames_of) as frames:
            async for frame in frames:
                yield frame

    async def Say(self, request: pb.SayRequest, context: Context) -> pb.SayReply:
        return await self.relays.said(request, context.caller.name)
