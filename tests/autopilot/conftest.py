"""A cluster of fake daemons on which moves have an effect: a rank that is activated on its target has left its source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Undone
from tests.autopilot.etcd_server import EtcdServer, must_be_installed
from tests.cli.conftest import Migrator, alone, migrator  # noqa: F401 - fixtures
from tests.cli.fake_cluster import ServedCluster
from tests.cli.fake_daemon import FakeDaemon

NODES = ("node-1", "node-2", "node-3", "spare-1", "spare-2")


@dataclass
class PilotDaemon(FakeDaemon):
    """Reports health as a daemon does, and takes part in moves."""

    others: dict[str, PilotDaemon] = field(default_factory=dict)
    arriving: dict[str, tuple[str, str]] = field(default_factory=dict)  # rank and target, by move
    changed: threading.Condition = field(default_factory=threading.Condition)
    events: list[pb.HealthEvent] = field(default_factory=list)
    fails_to: set[str] = field(default_factory=set)  # targets to which the stream fails
    blocked: set[str] = field(default_factory=set)  # methods that wait, after they were heard
    claims: list[pb.Rank] = field(default_factory=list)  # ranks that it lists and does not have
    said: int = 0
    on_begin: Callable[[str], Any] = lambda rank_uid: None  # may block
    room_bytes: int = 0  # memory for all ranks together; 0: as much as they like
    progress: Callable[[int], pb.NodeProgress] | None = None  # of its ranks, after a reading
    report: pb.Health | None = None  # instead of what is true; without an epoch it gets a new one each time

    def _hear(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        super()._hear(method, request, context)
        while method in self.blocked and context.is_active():
            time.sleep(0.05)

    def raise_alarm(self, check: str = "gpu-ecc", subject: str = "host", severity: Any = pb.CRITICAL) -> None:
        now = time.time()
        with self.changed:
            self.health.alarms.append(
                pb.Alarm(check=check, subject=subject, severity=severity, text="it fails", since_unix_s=now, count=1)
            )
            self.events.append(
                pb.HealthEvent(
                    sequence=len(self.events) + 1,
                    unix_s=now,
                    kind=pb.HealthEvent.RAISED,
                    check=check,
                    subject=subject,
                    severity=severity,
                    text="it fails",
                )
            )
            self.changed.notify_all()

    def GetHealth(self, request: pb.GetHealthRequest, context: grpc.ServicerContext) -> pb.Health:
        self._hear("GetHealth", request, context)
        if self.report is not None:
            made = pb.Health()
            made.CopyFrom(self.report)
            if not made.epoch:
                made.epoch = f"e{time.monotonic_ns()}"
                made.events.extend(pb.HealthEvent(sequence=number + 1, text="x" * 300) for number in range(10))
            return made
        known = request.after if request.epoch == "e1" else 0
        with self.changed:
            # Shorter than a daemon would wait, because a waiting thread cannot be stopped at the end of a test.
            self.changed.wait_for(lambda: len(self.events) > known, min(request.wait_s, 0.5))
            return pb.Health(
                node=self.name,
                epoch="e1",
                sequence=len(self.events),
                alarms=self.health.alarms,
                events=self.events[known:],
            )

    def GetNode(self, request: pb.GetNodeRequest, context: grpc.ServicerContext) -> pb.NodeInfo:
        info = super().GetNode(request, context)
        if self.room_bytes:
            info.memory_available_bytes = self.room_bytes - sum(rank.memory_bytes for rank in self.ranks)
        return info

    def GetProgress(self, request: pb.GetProgressRequest, context: grpc.ServicerContext) -> pb.NodeProgress:
        nothing = super().GetProgress(request, context)
        return self.progress(request.after) if self.progress is not None else nothing

    def ListRanks(self, request: pb.ListRanksRequest, context: grpc.ServicerContext) -> pb.ListRanksReply:
        """Of claims it says something new each time, and nothing to a driver that comes after `brief`."""
        reply = super().ListRanks(request, context)
        self.said = 0 if request.brief else self.said + 1
        for claim in self.claims if request.brief or self.said > 1 else ():
            reply.ranks.append(claim)
            reply.ranks[-1].memory_bytes += self.said
        return reply

    def Begin(self, request: pb.BeginRequest, context: grpc.ServicerContext) -> pb.BeginReply:
        self.on_begin(request.rank_uid)
        record = self.record(request.move)
        record.role, record.rank_uid = "source", request.rank_uid
        record.source_node, record.target_node = self.name, request.target_node
        self.arriving[request.move] = (request.rank_uid, request.target_node)
        return super().Begin(request, context)

    def Stream(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        if self.arriving[request.move][1] in self.fails_to:
            self.failures["Stream"] = Undone("the network is broken")
        else:
            self.failures.pop("Stream", None)
        return super().Stream(request, context)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.Outcome:
        uid, target = self.arriving[request.move]
        (rank,) = [rank for rank in self.ranks if rank.uid == uid]
        self.ranks.remove(rank)
        there = pb.Rank()
        there.CopyFrom(rank)
        there.at_node = target
        self.others[target].ranks.append(there)
        return super().Commit(request, context)

    def _activate(self, move: str) -> pb.ActivateReply:
        reply = super()._activate(move)
        self.record(move).role = "target"
        return reply


class PilotCluster(ServedCluster[PilotDaemon]):
    def places(self) -> dict[str, str]:
        """The node of every rank."""
        return {rank.uid: node for node, daemon in self.daemons.items() for rank in daemon.ranks}

    def begun(self) -> int:
        """How many moves have begun."""
        return sum(len(daemon.called("Begin")) for daemon in self.daemons.values())


@pytest.fixture
def pilots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PilotCluster]:
    made = PilotCluster(tmp_path / "cluster.toml")
    for node in NODES:
        labels = 'spare = "dedicated"' if node.startswith("spare") else ""
        made.serve(PilotDaemon(node, others=made.daemons), threads=8, labels=labels)
    monkeypatch.setenv("MIGRATOR_CLUSTER", str(made.path))
    monkeypatch.setenv("MIGRATOR_STATE", str(tmp_path / "state"))
    yield made
    made.stop(*made.servers)


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    must_be_installed(request)
    made = EtcdServer(tmp_path / "etcd")
    made.start()
    yield made
    made.kill()
