"""A fake daemon: a real gRPC server on a unix socket, whose answers a test chooses. `cluster` (conftest.py) has three."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from snapshotd import __version__
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as stubs
from snapshotd.api.errors import WIRE_KEY, SnapshotError
from tests.cli.fake_cluster import ServedCluster
from tests.cli.gated_job import Gated


@dataclass
class FakeDaemon(stubs.NodeServicer, stubs.SourceServicer, stubs.TargetServicer):
    """Gives the answers that a test has set, and records the calls."""

    name: str
    ranks: list[pb.Rank] = field(default_factory=list)
    moves: list[pb.MoveRecord] = field(default_factory=list)
    gates: list[pb.ClosedGate] = field(default_factory=list)
    jobs: list[pb.JobRecord] = field(default_factory=list)
    kept: list[pb.KeptImage] = field(default_factory=list)  # images of snapshots
    checks: list[pb.Check] = field(default_factory=list)
    rewires: list[pb.Rewire] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    gpus: list[pb.Gpu] = field(default_factory=list)
    gpu_problem: str = ""
    version: str = __version__
    protocol: pb.Protocol = field(default_factory=protocol.own)
    copy: pb.Copy = field(default_factory=lambda: pb.Copy(state=pb.Copy.NO_SUCH_MOVE))
    gated: list[Gated] = field(default_factory=list)  # the processes of this node that use NCCL
    gate_waits_for: str = ""
    finds: pb.FindNodeReply = field(default_factory=lambda: pb.FindNodeReply(found="its daemon does not answer"))
    diagnosis: pb.DiagnoseReply = field(default_factory=pb.DiagnoseReply)
    health: pb.Health = field(default_factory=pb.Health)
    clock_ahead_s: float = 0.0
    abandons: bool = True  # once a member is declared dead; else it has not decided how the move ends
    spans: pb.GetSpansReply = field(default_factory=pb.GetSpansReply)
    failures: dict[str, SnapshotError] = field(default_factory=dict)  # by method
    unknown: set[str] = field(default_factory=set)  # methods that an older daemon does not know
    copying: set[str] = field(default_factory=set)  # moves of which the copy of a snapshot is being sent
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def called(self, *methods: str) -> list[str]:
        """The calls of these methods, in order."""
        return [method for method, _ in self.asked if method in methods]

    def _hear(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self.asked.append((method, request))
        if method in self.unknown:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if (error := self.failures.get(method)) is not None:
            context.set_trailing_metadata(((WIRE_KEY, error.to_wire()),))
            context.abort(grpc.StatusCode[error.status], error.message)

    def record(self, move: str) -> pb.MoveRecord:
        """The daemon's record of a move. It is created if the test did not set one."""
        found = [record for record in self.moves if record.move == move]
        if not found:
            self.moves.append(pb.MoveRecord(move=move, begun_unix_s=1000.0))
        return found[0] if found else self.moves[-1]

    # ---------------------------------------------------------------- Node

    def GetNode(self, request: pb.GetNodeRequest, context: grpc.ServicerContext) -> pb.NodeInfo:
        self._hear("GetNode", request, context)
        return pb.NodeInfo(
            name=self.name,
            version=self.version,
            protocol=self.protocol,
            kernel="6.18.0",
            criu_version="4.2.1",
            memory_available_bytes=8_000_000_000,
            image_capacity_bytes=4_000_000_000,
            ranks=len(self.ranks),
            addresses=self.addresses,
            interfaces=["eth0"] * len(self.addresses),
            gpus=self.gpus,
            driver_version="580.159.04" if self.gpus else "",
            gpu_problem=self.gpu_problem,
            architecture="x86_64",
            now_unix_s=time.time() + self.clock_ahead_s,
        )

    def Diagnose(self, request: pb.DiagnoseRequest, context: grpc.ServicerContext) -> pb.DiagnoseReply:
        self._hear("Diagnose", request, context)
        return self.diagnosis

    def OpenProbe(self, request: pb.OpenProbeRequest, context: grpc.ServicerContext) -> pb.OpenProbeReply:
        raise AssertionError("only nodes ask for it")

    def GetHealth(self, request: pb.GetHealthRequest, context: grpc.ServicerContext) -> pb.Health:
        self._hear("GetHealth", request, context)
        return self.health

    def ClearAlarms(self, request: pb.ClearAlarmsRequest, context: grpc.ServicerContext) -> pb.ClearAlarmsReply:
        self._hear("ClearAlarms", request, context)
        wanted = [alarm for alarm in self.health.alarms if request.all or alarm.check == request.check]
        for alarm in wanted:
            self.health.alarms.remove(alarm)
        return pb.ClearAlarmsReply(cleared=wanted)

    def GetProgress(self, request: pb.GetProgressRequest, context: grpc.ServicerContext) -> pb.NodeProgress:
        self._hear("GetProgress", request, context)
        return pb.NodeProgress(now_unix_s=time.time())

    def GetSpans(self, request: pb.GetSpansRequest, context: grpc.ServicerContext) -> pb.GetSpansReply:
        self._hear("GetSpans", request, context)
        return self.spans

    def ListRanks(self, request: pb.ListRanksRequest, context: grpc.ServicerContext) -> pb.ListRanksReply:
        self._hear("ListRanks", request, context)
        return pb.ListRanksReply(ranks=self.ranks)

    def FindNode(self, request: pb.FindNodeRequest, context: grpc.ServicerContext) -> pb.FindNodeReply:
        self._hear("FindNode", request, context)
        return self.finds

    def ListMoves(self, request: pb.ListMovesRequest, context: grpc.ServicerContext) -> pb.ListMovesReply:
        self._hear("ListMoves", request, context)
        return pb.ListMovesReply(
            moves=[record for record in self.moves if request.move in ("", record.move)],
            gates=[gate for gate in self.gates if request.move in ("", gate.move)],
        )

    # ---------------------------------------------------------------- Source

    def Inspect(self, request: pb.InspectRequest, context: grpc.ServicerContext) -> pb.InspectReply:
        self._hear("Inspect", request, context)
        look = f"look {len(self.called('Inspect'))}"
        rank = next((one for one in self.ranks if one.uid == request.rank_uid), None)
        facts = pb.RankFacts(source_node=self.name, rank=rank)
        return pb.InspectReply(facts=facts, checks=self.checks, rewires=self.rewires, look=look)

    def Begin(self, request: pb.BeginRequest, context: grpc.ServicerContext) -> pb.BeginReply:
        self._hear("Begin", request, context)
        return pb.BeginReply()

    def PrepareDevice(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.PrepareDeviceReply:
        self._hear("PrepareDevice", request, context)
        return pb.PrepareDeviceReply(parts=[pb.Part(name="prepare", seconds=9.0)])

    def Detach(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.DetachReply:
        self._hear("Detach", request, context)
        return pb.DetachReply(comms=1)

    def Attach(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        self._hear("Attach", request, context)
        return pb.AttachReply(comms=1)

    def Freeze(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.FreezeReply:
        self._hear("Freeze", request, context)
        return pb.FreezeReply()

    def Stream(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        self._hear("Stream", request, context)
        yield pb.Progress(bytes_sent=1_000_000, bytes_expected=3_000_000)
        yield pb.Progress(bytes_sent=2_500_000, bytes_expected=3_000_000, done=True)

    def Renew(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.RenewReply:
        self._hear("Renew", request, context)
        return pb.RenewReply()

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.Outcome:
        self._hear("Commit", request, context)
        self.record(request.move).outcome = pb.COMMIT
        return self._outcome(request.move)

    def GetOutcome(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.Outcome:
        self._hear("GetOutcome", request, context)
        return self._outcome(request.move)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.Outcome:
        record = self.record(request.move)
        if record.outcome == pb.UNDECIDED:
            record.outcome, record.reason = pb.ABORT, request.reason
        self._hear("Abort", request, context)  # a failure here loses the answer, but not the record
        if record.outcome == pb.ABORT:
            record.mark, record.ended_unix_s, record.where = "settled", 2000.0, "running on source"
        return self._outcome(request.move)

    def Release(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        self._hear("Release", request, context)
        record = self.record(request.move)
        record.mark, record.ended_unix_s, record.where = "settled", 2000.0, "running on target"
        return pb.ReleaseReply(released=True)

    def DeclareTargetDead(self, request: pb.DeclareRequest, context: grpc.ServicerContext) -> pb.Outcome:
        self._hear("DeclareTargetDead", request, context)
        record = self.record(request.move)
        record.outcome, record.decided_by, record.where = pb.ABORT, request.declared_by, "running on source"
        record.mark, record.ended_unix_s = "settled", 2000.0
        return self._outcome(request.move)

    def DeclareMemberDead(self, request: pb.DeclareMemberRequest, context: grpc.ServicerContext) -> pb.Outcome:
        self._hear(
            "DeclareMemberDead" if not request.only_check else "DeclareMemberDead, only checked", request, context
        )
        record = self.record(request.move)
        if request.only_check:
            return self._outcome(request.move)
        if self.abandons:
            record.mark, record.ended_unix_s = "settled", 2000.0
        outcome = self._outcome(request.move)
        outcome.abandoned = self.abandons
        return outcome

    def GetImage(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.StoredImage:
        raise NotImplementedError

    def Send(self, request: pb.SendRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        raise NotImplementedError

    def Hurry(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.HurryReply:
        self._hear("Hurry", request, context)
        return pb.HurryReply(copying=request.move in self.copying)

    def DropImage(self, request: pb.DropImageRequest, context: grpc.ServicerContext) -> pb.DropImageReply:
        raise NotImplementedError

    def _outcome(self, move: str) -> pb.Outcome:
        record = self.record(move)
        token, settled = b"token" if record.outcome else b"", record.mark == "settled"
        return pb.Outcome(kind=record.outcome, token=token, where=record.where, settled=settled)

    # ---------------------------------------------------------------- Target

    def Examine(self, request: pb.ExamineRequest, context: grpc.ServicerContext) -> pb.ExamineReply:
        self._hear("Examine", request, context)
        return pb.ExamineReply(checks=self.checks)

    def Prepare(self, request: pb.PrepareRequest, context: grpc.ServicerContext) -> pb.PrepareReply:
        self._hear("Prepare", request, context)
        return pb.PrepareReply(nonce=b"n" * 32)

    def OpenImageChannel(
        self, request: pb.OpenImageChannelRequest, context: grpc.ServicerContext
    ) -> pb.OpenImageChannelReply:
        self._hear("OpenImageChannel", request, context)
        return pb.OpenImageChannelReply()

    def OpenDeviceChannel(
        self, request: pb.OpenDeviceChannelRequest, context: grpc.ServicerContext
    ) -> pb.OpenDeviceChannelReply:
        self._hear("OpenDeviceChannel", request, context)
        return pb.OpenDeviceChannelReply()

    def AllocateDeviceMemory(
        self, request: pb.AllocateDeviceMemoryRequest, context: grpc.ServicerContext
    ) -> pb.AllocateDeviceMemoryReply:
        self._hear("AllocateDeviceMemory", request, context)
        return pb.AllocateDeviceMemoryReply()

    def Seal(self, request: pb.SealRequest, context: grpc.ServicerContext) -> pb.SealReply:
        self._hear("Seal", request, context)
        return pb.SealReply()

    def Restore(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        self._hear("Restore", request, context)
        return pb.RestoreReply(held_receipt=b"held")

    def GetCopy(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.Copy:
        self._hear("GetCopy", request, context)
        return self.copy

    def Activate(self, request: pb.TokenRequest, context: grpc.ServicerContext) -> pb.ActivateReply:
        self._hear("Activate", request, context)
        return self._activate(request.move)

    def Discard(self, request: pb.TokenRequest, context: grpc.ServicerContext) -> pb.DiscardReply:
        self._hear("Discard", request, context)
        record = self.record(request.move)
        record.mark, record.outcome, record.ended_unix_s = "discarded", pb.ABORT, 2001.0
        return pb.DiscardReply()

    def DeclareSourceDead(self, request: pb.DeclareRequest, context: grpc.ServicerContext) -> pb.ActivateReply:
        self._hear("DeclareSourceDead", request, context)
        return self._activate(request.move)

    def _activate(self, move: str) -> pb.ActivateReply:
        record = self.record(move)
        record.mark, record.outcome, record.ended_unix_s = "activated", pb.COMMIT, 2001.0
        return pb.ActivateReply(running=True)


class FakeCluster(ServedCluster[FakeDaemon]):
    """Three fake daemons and the cluster file that names them."""
