"""A peer of a moving rank fails: its daemon is killed, its node is cut off, the source reboots. No connection is reset."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from integration.connections import (
    Endpoints,
    filters,
    no_filters,
    pid_of,
    unfinished,
    visible,
)
from integration.drill import node_of
from integration.harness import PATIENCE_S, SHORT_LEASE, Cluster, until
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = "node-1", "node-2", "spare-1"


class Crash:
    """A rank with peers on another node and on the source, for moves during which a peer fails."""

    def __init__(self, nodes: Cluster, ends: Endpoints) -> None:
        self.nodes, self.ends = nodes, ends
        self.rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7011", "--engine", "epoll")
        self.peers = [
            ends.peer(
                PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7011", "--connections", "3", "--engine", "epoll"
            ),
            ends.peer(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7011", "--engine", "forked"),
            ends.peer(SOURCE, "--connect", "127.0.0.1:7011"),
        ]
        ends.flow()
        self.before = [visible(pid_of(peer)) for peer in self.peers]

    def bring_back(self, node: str) -> None:
        until(f"the end of the daemon of {node}", lambda: self.nodes.lab.daemon_pid(node) is None)
        self.nodes.lab.start_daemon(node)

    def ends_well(self, *places: str) -> None:
        """One copy runs, on one of these nodes; every connection continues; a retry succeeds; nothing is left."""
        self.ends.flow()
        until("the move to settle", lambda: not unfinished(self.nodes) and not filters(self.nodes))
        assert self.place() in places, self.nodes.logs()
        assert [visible(pid_of(peer)) for peer in self.peers] == self.before
        self.nodes.move(self.rank, TARGET if self.place() != TARGET else SOURCE)
        self.ends.flow()
        no_filters(self.nodes)
        self.ends.end()

    def place(self) -> str:
        peers = {pid_of(peer) for peer in self.peers}
        children = {pid for pid in self.ends.copies() if os.path.exists(f"/proc/{pid}") and parent(pid) in peers}
        places = {node_of(pid) for pid in self.ends.copies() if pid not in peers | children}
        assert len(places) == 1, f"copies on {places}\n{self.nodes.logs()}"
        return places.pop()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.sampled(2, cover="point")
@pytest.mark.parametrize(
    "point", [Point.SUSPEND, Point.HOLD, Point.BEFORE_REPOINT, Point.REPOINTING, Point.REPOINT, Point.BEFORE_SETTLE]
)
def test_peer_daemon_killed_breaks_no_connection(nodes: Cluster, ends: Endpoints, point: Point) -> None:
    crash = Crash(nodes, ends)
    nodes.fault(PEER, point, "kill")
    with nodes.begin_move(crash.rank, TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}", lambda: nodes.fired(PEER))
        crash.bring_back(PEER)
        asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode == (0 if point is Point.BEFORE_SETTLE else 11), nodes.logs()
    crash.ends_well(TARGET if point is Point.BEFORE_SETTLE else SOURCE)


@pytest.mark.sampled(4, group="connections")
def test_driver_killed_between_re_pointing_and_outcome_is_undone(nodes: Cluster, ends: Endpoints) -> None:
    crash = Crash(nodes, ends)
    nodes.fault(PEER, Point.REPOINT, "wait")
    with nodes.begin_move(crash.rank, TARGET, more=SHORT_LEASE) as asked:
        until("the re-pointing", lambda: nodes.fired(PEER))
        asked.kill()
    (nodes.run_dir(PEER) / f"{Point.REPOINT}.go").touch()
    crash.ends_well(SOURCE)


@pytest.mark.sampled(4, group="connections")
def test_source_that_reboots_before_the_re_point_resets_no_peer(nodes: Cluster, ends: Endpoints) -> None:
    """The driver is killed too. The source commits the target's copy after its reboot, and the peer follows by itself."""
    ends.rank(SOURCE, "--serve", "0.0.0.0:7013", "--engine", "epoll")
    peer = ends.peer(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7013", "--connections", "3", "--engine", "epoll")
    ends.flow()
    before = visible(pid_of(peer))
    nodes.fault(TARGET, Point.RESTORE, "wait")
    with nodes.begin_move(ends.jobs[0], TARGET, more=SHORT_LEASE) as asked:
        until("the held copy", lambda: nodes.fired(TARGET))
        nodes.lab.crash(SOURCE)
        asked.kill()
    (nodes.run_dir(TARGET) / f"{Point.RESTORE}.go").touch()
    nodes.lab.boot(SOURCE)  # from now on its kernel answers what the peer sends with RST
    until("the move to settle", lambda: not unfinished(nodes) and not filters(nodes))
    peer.await_progress(3)
    assert visible(pid_of(peer)) == before
    ends.until.touch()
    assert peer.finish() == 0, peer.text()


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.REPOINT, Point.BEFORE_SETTLE])
def test_peer_cut_off_around_the_outcome_keeps_its_connections(nodes: Cluster, ends: Endpoints, point: Point) -> None:
    """The peer is unreachable for five seconds. Before COMMIT the move is undone, after it finished. No node waits."""
    crash = Crash(nodes, ends)
    others = ("operator", SOURCE, TARGET)
    nodes.fault(PEER, point, "wait")
    with nodes.begin_move(crash.rank, TARGET, more=SHORT_LEASE) as asked:
        until(f"{point}", lambda: nodes.fired(PEER))
        for other in others:
            nodes.lab.partition(PEER, other)
        (nodes.run_dir(PEER) / f"{point}.go").touch()
        time.sleep(5)  # the time that it is cut off
        for other in others:
            nodes.lab.heal(PEER, other)
        with contextlib.suppress(Exception):
            asked.communicate(timeout=PATIENCE_S)
    crash.ends_well(SOURCE, TARGET)
