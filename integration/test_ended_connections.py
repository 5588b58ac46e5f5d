"""TCP connections that end, or have ended, on one side, and those that do not follow a rank that moves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration.connections import (
    Endpoints,
    checks,
    in_node,
    no_filters,
    shared_address,
)
from integration.harness import WORKLOADS, Cluster, Job, until
from snapshotd.net import sockets
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = "node-1", "node-2", "spare-1"


@pytest.mark.sampled(4, group="connections")
def test_connection_outside_the_cluster_is_listed_and_reset(nodes: Cluster) -> None:
    command = [sys.executable, str(WORKLOADS / "outside.py"), "10.213.0.1:7006"]
    server = nodes.lab.spawn("operator", [*command, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "READY\n"
        rank = nodes.start(SOURCE, command, job="outside")
        until("answers", lambda: "answer 1" in rank.text())
        said = checks(nodes, rank, TARGET)["outside-world"]
        assert said["verdict"] == "warn"
        assert "10.213.0.1:7006" in said["reason"]
        nodes.move(rank, TARGET)
        until("another connection", lambda: "answer 2" in rank.text())
        assert [line for line in rank.lines() if not line.startswith("answer")] == [
            *("CONNECTED 1", "RESET 1", "CONNECTED 2")
        ]
        assert server.stdout.readline() == "PARTED\n"  # the other side sees the reset too
    finally:
        server.kill()
        server.communicate()


ECHO = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)
print("READY", flush=True)
socketserver.ThreadingTCPServer(("0.0.0.0", 7014), Echo).serve_forever()
"""
CALL = """
import socket, struct, sys, time
with socket.create_connection((sys.argv[1], 7014), 60, ("", int(sys.argv[2]))) as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, and no TIME_WAIT, at its end
    while True:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        print("step", flush=True)
        time.sleep(0.05)
"""


@pytest.mark.sampled(4, group="connections")
def test_connection_whose_addresses_are_taken_on_the_target_is_named_before_a_pause(nodes: Cluster) -> None:
    """Another process there has called the same peer from the same port."""

    def spawn(node: str, name: str, *command: str) -> Job:
        out = nodes.folder / f"{name}.out"
        with out.open("wb") as file:
            process = nodes.lab.spawn(
                node, [sys.executable, "-c", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        nodes.jobs.append(Job(nodes.lab, process, out, name))
        return nodes.jobs[-1]

    echo, peer, here = spawn(PEER, "echo", ECHO), nodes.lab.address(PEER), nodes.lab.address(TARGET)
    until("the peer to listen", lambda: "READY" in echo.text())
    rank = nodes.start(SOURCE, [sys.executable, "-c", CALL, peer, "41234"], job="caller")
    stranger = spawn(TARGET, "stranger", CALL, peer, "41234")
    for job in (rank, stranger):
        job.await_lines(3)
    refused = nodes.move(rank, TARGET, expect=10)
    assert f"connections with these addresses and ports exist here: {here}:41234 – {peer}:7014" in str(refused)
    for job in (rank, stranger):
        job.await_progress()
    stranger.kill()
    until("the addresses to be free", lambda: checks(nodes, rank, TARGET)["target-ports"]["verdict"] == "pass")
    nodes.move(rank, TARGET)
    rank.await_progress()
    rank.kill()
    echo.kill()


@pytest.mark.sampled(4, group="connections")
def test_half_closed_connection_is_refused(nodes: Cluster) -> None:
    command = [sys.executable, str(WORKLOADS / "outside.py"), "--half-close"]
    server = nodes.lab.spawn(PEER, [*command, "--serve", "0.0.0.0:7007"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "READY\n"
        rank = nodes.start(SOURCE, [*command, f"{nodes.lab.address(PEER)}:7007"], job="half")
        until("the connection", lambda: "CONNECTED 1" in rank.text())
        refused = nodes.move(rank, TARGET, expect=10)
        assert "half-closed" in refused["reason"], refused
    finally:
        server.kill()
        server.communicate()


@pytest.mark.sampled(4, group="connections")
def test_connection_that_its_peer_has_closed_follows_the_rank(nodes: Cluster) -> None:
    """The peers are on another node and on the source, and their kernels still know the connection, or not any more. The rank
    reads what had arrived, and then the end, after any number of moves."""
    closed, go = nodes.folder / "ended.closed", nodes.folder / "ended.go"
    for file in (closed, go):
        file.unlink(missing_ok=True)
    program = [sys.executable, str(WORKLOADS / "ended.py")]
    serve = [*program, "--when", str(closed), "--serve"]
    asked = [(PEER, "0.0.0.0:7014", []), (PEER, "0.0.0.0:7015", ["--forget"]), (SOURCE, "127.0.0.1:7016", ["--forget"])]
    servers = [
        nodes.lab.spawn(node, [*serve, *more, at], stdout=subprocess.PIPE, text=True) for node, at, more in asked
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "READY\n"
        there = nodes.lab.address(PEER)
        addresses = [f"{there}:7014", f"{there}:7015", "127.0.0.1:7016"]
        rank = nodes.start(SOURCE, [*program, "--when", str(go), *addresses], job="ended")
        until("the connections", lambda: "CONNECTED" in rank.text())
        closed.touch()
        until("the end of the connections", lambda: ends_of(nodes, PEER, {7014, 7015}) <= {(7014, "fin-wait-2")})
        until("the end of the one over loopback", lambda: ends_of(nodes, SOURCE, {7016}) == set())
        for to in (TARGET, SOURCE, TARGET):
            nodes.move(rank, to)
        no_filters(nodes)
        go.touch()
        assert rank.finish() == 0, rank.text()
        heard = [line for line in rank.lines() if "heard" in line]
        assert heard == [f"{number} heard last words" for number in range(4)]
        written = {line.split()[1] for line in rank.lines()[1:-1] if "heard" not in line}
        assert written <= {"ECONNRESET", "EPIPE"}, rank.text()
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def ends_of(nodes: Cluster, node: str, ports: set[int]) -> set[tuple[int, str]]:
    """The connections of servers at these ports, with their states."""
    rows = in_node(nodes, node, lambda: sockets._all_rows({"tcp"}))
    return {(row.local.port, row.state) for row in rows if row.local.port in ports and row.remote}


@pytest.mark.sampled(4, group="connections")
def test_connection_that_its_peer_closes_during_a_move_follows_the_rank(nodes: Cluster) -> None:
    """The frozen rank cannot learn it, so the move is undone and tried again."""
    closed, go = nodes.folder / "ended.closed", nodes.folder / "ended.go"
    for file in (closed, go):
        file.unlink(missing_ok=True)
    program = [sys.executable, str(WORKLOADS / "ended.py")]
    serve = [*program, "--when", str(closed), "--serve", "0.0.0.0:7017"]
    server = nodes.lab.spawn(PEER, serve, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "READY\n"
        rank = nodes.start(SOURCE, [*program, "--when", str(go), f"{nodes.lab.address(PEER)}:7017"], job="ending")
        until("the connections", lambda: "CONNECTED" in rank.text())
        with nodes.moving(rank, TARGET, TARGET, Point.BEFORE_RESTORE) as asked:
            closed.touch()
            until("the end of the connection", lambda: ends_of(nodes, PEER, {7017}) == {(7017, "fin-wait-1")})
        assert asked.code == 0, asked.answer["reason"]
        assert asked.answer["attempts"] == 2
        go.touch()
        assert rank.finish() == 0, rank.text()
        assert [line for line in rank.lines() if "heard" in line] == ["0 heard last words", "1 heard last words"]
        no_filters(nodes)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.sampled(4, group="connections")
def test_listener_on_loopback_is_named_and_works_on_the_target(nodes: Cluster, ends: Endpoints) -> None:
    """Every node has the address of a local bridge, which must not become that of a connection between nodes."""
    rank = ends.rank(SOURCE, "--serve", "127.0.0.1:7008")
    ends.peer(SOURCE, "--connect", "127.0.0.1:7008")
    with shared_address(nodes, "172.17.0.1"):
        listener_on_loopback(nodes, ends, rank)


def listener_on_loopback(nodes: Cluster, ends: Endpoints, rank: Job) -> None:
    said = checks(nodes, rank, TARGET)["loopback-listeners"]
    assert said["verdict"] == "warn"
    assert "127.0.0.1:7008" in said["reason"]
    nodes.move(rank, TARGET)
    ends.flow()  # the existing connection continues
    ends.peer(TARGET, "--connect", "127.0.0.1:7008")
    ends.flow()
    no_filters(nodes)
    ends.end()
