"""The job records of a fake daemon, and a rollback among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api import snapshotd_pb2_grpc as stubs

if TYPE_CHECKING:
    from tests.cli.fake_daemon import FakeDaemon


class FakeJobs(stubs.JobServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon

    def List(self, request: pb.ListJobsRequest, context: grpc.ServicerContext) -> pb.ListJobsReply:
        wanted = [one for one in self.daemon.jobs if one.kind == "rollback" or not request.rollbacks_only]
        return pb.ListJobsReply(jobs=wanted)

    def ListKept(self, request: pb.ListKeptRequest, context: grpc.ServicerContext) -> pb.ListKeptReply:
        return pb.ListKeptReply(images=self.daemon.kept)


def a_rollback(record: str = "m-0000000000cc", **fields: Any) -> pb.JobRecord:
    """That of a job with two ranks, which was resumed."""
    given: dict[str, Any] = {
        "record": record,
        "job": "train",
        "user_id": 7,
        "ranks": 2,
        "kind": "rollback",
        "snapshot": "m-0000000000aa",
        "outcome": pb.COMMIT,
        "reason": "node-7 lost (does not answer)",
        "decided_by": "alice",
        "begun_unix_s": 2000.0,
        "ended_unix_s": 2003.0,
        "ended_by": "m-0000000000dd",
        "lost_s": 143.2,
        "down_s": 11.8,
        "resumed_unix_s": 2004.0,
    }
    return pb.JobRecord(**(given | fields))
