"""Serves fake daemons over real gRPC on unix sockets, and writes the cluster file that names them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from snapshotd.api import snapshotd_pb2_grpc as stubs
from tests.cli.fake_gates import FakeGates
from tests.cli.fake_jobs import FakeJobs

if TYPE_CHECKING:
    from tests.cli.fake_daemon import FakeDaemon

Daemon = TypeVar("Daemon", bound="FakeDaemon")


@dataclass
class ServedCluster(Generic[Daemon]):
    """`path` is the cluster file; the sockets are beside it. `stop` makes nodes unreachable."""

    path: Path
    daemons: dict[str, Daemon] = field(default_factory=dict)
    servers: dict[str, grpc.Server] = field(default_factory=dict)

    def __getitem__(self, node: str) -> Daemon:
        return self.daemons[node]

    def serve(self, daemon: Daemon, *, threads: int = 2, labels: str = "") -> None:
        """Adds a node. `labels` are lines of TOML."""
        address = f"unix:{self.path.parent}/{daemon.name}.sock"
        self.daemons[daemon.name] = daemon
        self.servers[daemon.name] = server = grpc.server(ThreadPoolExecutor(threads))
        stubs.add_NodeServicer_to_server(daemon, server)
        stubs.add_SourceServicer_to_server(daemon, server)
        stubs.add_TargetServicer_to_server(daemon, server)
        stubs.add_GateServicer_to_server(FakeGates(daemon), server)
        stubs.add_JobServicer_to_server(FakeJobs(daemon), server)  # type: ignore[abstract] # it lists only
        server.add_insecure_port(address)
        server.start()
        with self.path.open("a") as file:
            file.write(f'[nodes.{daemon.name}]\nendpoint = "{address}"\n')
            file.write(f"[nodes.{daemon.name}.labels]\n{labels}\n" if labels else "")

    def stop(self, *nodes: str) -> None:
        for node in nodes:
            self.servers[node].stop(0).wait()
