"""Nodes that lose power in the middle of the move of a rank with TCP connections: the source, the target, a peer's node.

Records on the connections are numbered and checksummed (workloads/streams.py), so a lost or repeated byte is noticed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from integration.harness import WORKLOADS, until
from integration.systemd.cluster import USER, SystemdCluster, steps

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


class Streams:
    """Two jobs of one user with connections between them: the peer accepts, the rank connects."""

    def __init__(self, cluster: SystemdCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.rank, self.peer = f"{name}-rank", f"{name}-peer"
        self.homes: dict[str, str] = {}
        self._until = f"/home/{USER}/{name}.until"
        shutil.copy(WORKLOADS / "streams.py", cluster.home)

    def start(self, *, rank_on: str, peer_on: str, port: int) -> None:
        address = f"{self.cluster.nodes[peer_on].address}:{port}"
        self._run(self.peer, peer_on, "--serve", address)
        until("the peer to listen", lambda: steps(self.out(self.peer)) >= 1)
        self._run(self.rank, rank_on, "--connect", address, "--connections", "3")
        self.flow()

    def _run(self, job: str, on: str, *arguments: str) -> None:
        self.homes[job] = on
        self.cluster.nodes[on].run(
            *("systemd-run", f"--unit={job}", f"--uid={USER}", f"--working-directory=/home/{USER}"),
            *(f"--property=StandardOutput=append:/home/{USER}/{job}.out", "--property=StandardError=journal"),
            *("--property=RemainAfterExit=yes", "--", "migrator", "run", "--job", job, "--"),
            *("/usr/bin/python3", f"/home/{USER}/streams.py", *arguments, "--engine", "epoll", "--until", self._until),
        )

    def out(self, job: str) -> Path:
        return self.cluster.home / f"{job}.out"

    def flow(self, more: int = 5) -> None:
        """Records arrive in both directions."""
        for job in (self.rank, self.peer):
            self.cluster.await_steps(self.out(job), more)

    def result(self, job: str) -> str:
        """How the job's service has ended; "" while it runs."""
        node = self.cluster.nodes[self.homes[job]]
        ended = node.show(job, "SubState") in ("exited", "failed")
        return node.show(job, "Result") if ended else ""

    def end(self) -> None:
        """Both programs end by themselves, after every record has arrived."""
        (self.cluster.home / f"{self.name}.until").touch()
        for job in (self.rank, self.peer):
            result = until(f"the end of {job}", partial(self.result, job))
            assert result == "success", self.out(job).read_text()[-500:]

    def forget(self) -> None:
        for job, on in self.homes.items():
            node = self.cluster.nodes[on]
            node.ask("systemctl", "stop", job, timeout_s=300)
            node.ask("systemctl", "reset-failed", job)


@pytest.fixture
def streams(installed: SystemdCluster, request: pytest.FixtureRequest) -> Iterator[Streams]:
    made = Streams(installed, request.node.name.split("_")[1])
    yield made
    made.forget()


def test_source_that_loses_power_with_a_peer_resets_no_connection(installed: SystemdCluster, streams: Streams) -> None:
    """The rank's keeper, the peer and the driver are on a third node."""
    streams.start(rank_on="node-1", peer_on="node-1", port=7101)
    installed.move(streams.rank, "node-2")
    streams.flow()
    driver = installed.stopped_at(streams.rank, "spare-1", "spare-1", "restore")
    installed.nodes["node-2"].lose_power()
    installed.nodes["spare-1"].run("touch", "/run/snapshotd/restore.go")
    installed.nodes["node-2"].boot()  # from now on its kernel answers what the peer sends with RST
    installed.await_driver(driver)
    until("the rank on the target", lambda: installed.node_of(streams.rank) == "spare-1", 300)
    streams.flow()
    streams.end()


def test_target_that_loses_power_with_a_peer_resets_no_connection(installed: SystemdCluster, streams: Streams) -> None:
    streams.start(rank_on="node-1", peer_on="spare-1", port=7102)
    driver = installed.stopped_at(streams.rank, "node-2", "node-2", "restored")
    installed.nodes["node-2"].lose_power()
    installed.nodes["node-2"].boot()
    installed.await_driver(driver)
    until("the rank to be known", lambda: installed.node_of(streams.rank) == "node-1")
    streams.flow()
    installed.move(streams.rank, "node-2")
    streams.flow()
    streams.end()


def test_peers_node_that_loses_power_ends_its_connections_and_nothing_else(
    installed: SystemdCluster, streams: Streams
) -> None:
    """The peer is gone with its node. The move is undone or finished, and the rank is told that its peer is gone."""
    streams.start(rank_on="node-1", peer_on="spare-1", port=7103)
    out = installed.start_job("unconcerned")
    driver = installed.stopped_at(streams.rank, "node-2", "node-2", "restored")
    installed.nodes["spare-1"].lose_power()
    installed.nodes["node-2"].run("touch", "/run/snapshotd/restored.go")
    installed.nodes["spare-1"].boot()
    installed.await_driver(driver)
    until("the rank to end", lambda: streams.result(streams.rank) == "exit-code", 300)
    last = streams.out(streams.rank).read_text().splitlines()[-1]
    assert last.startswith("LOST"), last
    until("no unfinished move", lambda: '"moves": []' in installed.migrator("status", "--json").stdout)
    installed.move("unconcerned", "spare-1")
    installed.await_steps(out)
    installed.end_job("unconcerned")
