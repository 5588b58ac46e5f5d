"""TCP connections follow a rank that moves under load: no byte is lost or duplicated, and no connection is reset."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from integration.connections import (
    Endpoints,
    forwardings,
    give_ipv6,
    in_node,
    ipv6,
    no_filters,
    pid_of,
    visible,
)
from integration.harness import WORKLOADS, Cluster, Job, until
from snapshotd.net import sockets
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = "node-1", "node-2", "spare-1"


# ---------------------------------------------------------------- streams


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("engine", "listen", "caller"),
    [("blocking", "0.0.0.0", "v4"), ("epoll", "[::]", "v6"), ("epoll", "[::]", "mapped"), ("forked", "0.0.0.0", "v4")],
)
def test_streams_follow_a_rank_from_node_to_node(
    nodes: Cluster, ends: Endpoints, engine: str, listen: str, caller: str
) -> None:
    """Peers on another node and on the source's loopback; moves to a spare, to the node of a peer, and home again."""
    give_ipv6(nodes)
    rank = ends.rank(SOURCE, "--serve", f"{listen}:7000", "--engine", engine)
    there = f"[{ipv6(nodes, SOURCE)}]" if caller == "v6" else nodes.lab.address(SOURCE)
    loopback = "[::1]" if caller == "v6" else "127.0.0.1"
    peers = [
        ends.peer(PEER, "--connect", f"{there}:7000", "--connections", "3", "--engine", engine),
        ends.peer(SOURCE, "--connect", f"{loopback}:7000", "--connections", "2", "--engine", "epoll"),
    ]
    ends.flow()
    before = [visible(pid_of(peer)) for peer in peers]
    for to in (TARGET, PEER, SOURCE):
        nodes.move(rank, to)
        ends.flow()
        assert [visible(pid_of(peer)) for peer in peers] == before
    no_filters(nodes)
    ends.end()
    until("forwardings to be gone", lambda: not forwardings(nodes))


@pytest.mark.sampled(4, group="connections")
def test_full_queues_of_outgoing_connections_follow_the_rank(nodes: Cluster, ends: Endpoints) -> None:
    """No process reads for a while: both queues of both sockets are full when the rank is frozen."""
    ends.peer(PEER, "--serve", "0.0.0.0:7001", "--engine", "epoll", "--stall", str(ends.stall), "--pace-s", "0")
    address = nodes.lab.address(PEER)
    rank = ends.rank(
        *(SOURCE, "--connect", f"{address}:7001", "--connections", "2", "--engine", "forked"),
        *("--stall", str(ends.stall), "--pace-s", "0"),
    )
    ends.flow()
    ends.stall.touch()
    until("both queues to fill", lambda: queued(nodes, PEER, 7001))
    for to in (TARGET, SOURCE):
        nodes.move(rank, to)
        assert queued(nodes, PEER, 7001)
    ends.stall.unlink()
    ends.flow()
    no_filters(nodes)
    ends.end()


def queued(nodes: Cluster, node: str, port: int) -> bool:
    """Whether every connection of a port has bytes unread and bytes unacknowledged."""
    rows = in_node(nodes, node, lambda: sockets._all_rows({"tcp"}))
    mine = [row for row in rows if row.local.port == port and row.state == "established"]
    return bool(mine) and all(row.unread_bytes > 50_000 and row.unacked_bytes > 50_000 for row in mine)


@pytest.mark.sampled(4, group="connections")
def test_undone_move_leaves_connections_unchanged(nodes: Cluster, ends: Endpoints) -> None:
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7002", "--engine", "epoll")
    address = nodes.lab.address(SOURCE)
    peers = [
        ends.peer(PEER, "--connect", f"{address}:7002", "--connections", "2"),
        ends.peer(SOURCE, "--connect", "127.0.0.1:7002"),
    ]
    ends.flow()
    before = [visible(pid_of(peer)) for peer in peers]
    nodes.fault(TARGET, Point.RESTORING, "fail")
    nodes.move(rank, TARGET, expect=11)
    ends.flow()
    nodes.fault(SOURCE, Point.BEFORE_COMMIT, "fail")  # after all peers were re-pointed
    nodes.move(rank, TARGET, expect=11)
    ends.flow()
    assert [visible(pid_of(peer)) for peer in peers] == before
    no_filters(nodes)
    nodes.move(rank, TARGET)
    ends.flow()
    ends.end()


# ---------------------------------------------------------------- new connections


@pytest.mark.sampled(4, group="connections")
def test_new_connections_reach_the_rank_on_every_node(nodes: Cluster, ends: Endpoints) -> None:
    """They are made during and after each move. Connections made through a forwarding follow the next moves too."""
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7003", "--engine", "epoll")
    address = f"{nodes.lab.address(SOURCE)}:7003"
    for to, source in ((TARGET, SOURCE), (PEER, TARGET), (SOURCE, PEER)):
        with nodes.moving(rank, to, source, Point.BEFORE_COMMIT) as asked:
            for node, where in ((PEER, address), (SOURCE, address), (SOURCE, "127.0.0.1:7003")):
                ends.peer(node, "--connect", where, ready=False)
            until("the connection attempts", lambda: all(calling(nodes, node, 7003) for node in (PEER, SOURCE)))
        assert asked.code == 0, asked
        ends.await_ready()
        ends.flow()
        ends.peer(PEER, "--connect", address)
        ends.flow()
    no_filters(nodes)
    ends.end()
    until("forwardings to be gone", lambda: not forwardings(nodes))


def calling(nodes: Cluster, node: str, port: int) -> bool:
    rows = in_node(nodes, node, lambda: sockets._all_rows({"tcp"}))
    return any(row.state == "syn-sent" and row.remote and row.remote.port == port for row in rows)


@pytest.mark.sampled(4, group="connections")
def test_connection_made_during_an_undone_move_is_accepted(nodes: Cluster, ends: Endpoints) -> None:
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7004")
    with nodes.moving(rank, TARGET, TARGET, Point.BEFORE_RESTORE) as asked:
        late = ends.peer(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7004", ready=False)
        until("the connection attempt", lambda: calling(nodes, PEER, 7004))
        nodes.lab.kill_daemon(TARGET)
    assert asked.code == 11, asked
    until("the late connection", lambda: "READY" in late.text())
    ends.flow()
    ends.end()


@pytest.mark.sampled(4, group="connections")
def test_forwardings_survive_daemons_and_end_with_the_job(nodes: Cluster, ends: Endpoints) -> None:
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7005", "--engine", "epoll")
    address = f"{nodes.lab.address(SOURCE)}:7005"
    nodes.move(rank, TARGET)
    until("forwardings everywhere", lambda: len(forwardings(nodes)) == 3)
    nodes.lab.kill_daemon(SOURCE, signal.SIGTERM)
    peers = [ends.peer(PEER, "--connect", address), ends.peer(SOURCE, "--connect", "127.0.0.1:7005")]
    for peer in peers:  # the rank's own output waits for its home daemon
        peer.await_progress(5)
    nodes.lab.start_daemon(SOURCE)
    ends.flow()
    assert len(forwardings(nodes)) == 3
    nodes.lab.crash(TARGET)  # the rank dies with its node
    nodes.lab.boot(TARGET)
    assert rank.finish() != 0
    until(f"forwardings to be gone {forwardings(nodes)}\n{nodes.logs()}", lambda: not forwardings(nodes))


# ---------------------------------------------------------------- socket options, time-outs, other sockets


@pytest.mark.sampled(4, group="connections")
def test_socket_options_and_unusual_sockets_are_kept(nodes: Cluster, ends: Endpoints) -> None:
    here, there = nodes.lab.address(SOURCE), nodes.lab.address(PEER)
    command = [sys.executable, str(WORKLOADS / "sockets.py"), "--echo", f"{there}:7009", "--stream", f"{there}:7009"]
    command += ["--until", str(ends.until), "--here", here]
    server = nodes.lab.spawn(PEER, [*command, "--serve"])
    try:
        until("the echo", lambda: in_node(nodes, PEER, lambda: sockets.listeners({7009})))
        rank = nodes.start(SOURCE, command, job="odd")
        rank.await_lines(3)
        for to in (TARGET, SOURCE, TARGET):
            nodes.move(rank, to)
            rank.await_progress(2)
            until("time-outs", lambda: "user-timeout=54321 keepalive=1" in rank.lines()[-1])
        whole = rank.text().split("\n")[:-1]  # the last line may be incomplete
        found = {line for line in whole if line.startswith("options user-timeout=54321 keepalive=1")}
        assert len(found) == 1, found
        ends.until.touch()
        assert rank.finish() == 0
        assert rank.lines()[-1] == f"bound {nodes.lab.address(TARGET)} True b'kept'"
    finally:
        server.kill()
        server.wait()


@pytest.mark.sampled(4, group="connections")
def test_short_tcp_time_outs_do_not_end_a_connection_during_a_move(nodes: Cluster, ends: Endpoints) -> None:
    """TCP_USER_TIMEOUT and keepalive of one or two seconds on both sockets, and a pause of more than three."""
    short = ("--user-timeout-ms", "1500", "--keepalive-s", "1")
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7010", *short)
    ends.peer(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7010", *short)
    ends.peer(SOURCE, "--connect", "127.0.0.1:7010", *short)
    ends.flow()
    for to, source in ((TARGET, SOURCE), (SOURCE, TARGET)):
        with nodes.moving(rank, to, source, Point.BEFORE_COMMIT) as asked:
            time.sleep(3.5)  # the pause itself is the test
        assert asked.code == 0, asked
        ends.flow()
    nodes.fault(TARGET, Point.BEFORE_RESTORE, "wait")
    with nodes.moving(rank, TARGET, TARGET, Point.BEFORE_RESTORE) as asked:
        time.sleep(3.5)
        nodes.lab.kill_daemon(TARGET)
    assert asked.code == 11, asked
    ends.flow()
    ends.end()


@pytest.mark.sampled(4, group="connections")
def test_two_connected_ranks_do_not_move_at_the_same_time(nodes: Cluster, ends: Endpoints) -> None:
    first = ends.rank(SOURCE, "--serve", "0.0.0.0:7012", rank=0)
    second: Job = ends.rank(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7012", rank=1)
    ends.flow()
    with nodes.moving(first, TARGET, SOURCE, Point.BEFORE_COMMIT) as asked:
        refused = nodes.move(second, TARGET, rank=1, expect=10)
        assert "moved itself" in refused["reason"] or "not finished" in refused["reason"], refused
    assert asked.code == 0, asked
    ends.flow()
    nodes.move(second, SOURCE, rank=1)
    nodes.move(first, PEER)
    ends.flow()
    no_filters(nodes)
    ends.end()
