"""The gates of a fake daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as stubs

if TYPE_CHECKING:
    from tests.cli.fake_daemon import FakeDaemon


@dataclass
class FakeGates(stubs.GateServicer):
    """The gates of a fake daemon's node. The daemon records the calls."""

    daemon: FakeDaemon

    def _shown(self) -> pb.GateReport:
        return pb.GateReport(processes=[process.shown() for process in self.daemon.gated])

    def Report(self, request: pb.GateReportRequest, context: grpc.ServicerContext) -> pb.GateReport:
        self.daemon._hear("Report", request, context)
        return self._shown()

    def Close(self, request: pb.MoveDescription, context: grpc.ServicerContext) -> pb.GateReport:
        self.daemon._hear("Close", request, context)
        for process in self.daemon.gated:
            process.gate = "closed"
        return self._shown()

    def SetTargets(self, request: pb.SetTargetsRequest, context: grpc.ServicerContext) -> pb.GateReport:
        self.daemon._hear("SetTargets", request, context)
        handed = {(targets.rank_uid, targets.pid): targets for targets in request.processes}
        for process in self.daemon.gated:
            if (process.rank_uid, process.pid) in handed:
                process.take(handed[process.rank_uid, process.pid])
        return self._shown()

    def Open(self, request: pb.TokenRequest, context: grpc.ServicerContext) -> pb.OpenReply:
        self.daemon._hear("Open", request, context)
        for process in self.daemon.gated:
            process.gate = "closed" if self.daemon.gate_waits_for else "open"
        return pb.OpenReply(opened=not self.daemon.gate_waits_for, waiting_for=self.daemon.gate_waits_for)

    def Detach(self, request: pb.DetachRequest, context: grpc.ServicerContext) -> pb.DetachReply:
        raise NotImplementedError("between daemons")

    def NewId(self, request: pb.NewIdRequest, context: grpc.ServicerContext) -> pb.NewIdReply:
        raise NotImplementedError("between daemons")

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        raise NotImplementedError("between daemons")

    def GiveUp(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.GiveUpReply:
        raise NotImplementedError("between daemons")
