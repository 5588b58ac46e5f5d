"""Attacks through the list of a rank's connections, which the node that the rank leaves makes up: node-1, in a move of one of
its ranks to node-3, names connections of other processes on node-2."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net import sockets
from snapshotd.net.flows import Address, Flow, Pair
from tests.net.forwarding_node import PORT as DAEMON_PORT
from tests.net.hosts import REPOSITORY, Host, Hosts

pytestmark = pytest.mark.root

USER, STRANGER = 1500, 1501
PORT = 5432
ACCEPTS = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], int(sys.argv[2])), family=family) as server:
    print("ready", flush=True)
    kept = []
    while True:
        kept.append(server.accept())
"""
CONNECTS = """
import os, socket, sys
os.setgid(int(sys.argv[4])); os.setuid(int(sys.argv[4]))
with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as connection:
    connection.bind((sys.argv[3], 0))
    connection.connect((sys.argv[1], int(sys.argv[2])))
    print(connection.getsockname()[1], flush=True)
    sys.stdin.read()
"""


class Cluster:
    """h1, h2 and h3 as the nodes node-1, the source, node-2, where the victims are, and node-3, the target."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder, self.ca = hosts, folder, folder / "ca"
        self.moves = itertools.count(1)
        self.operator: subprocess.Popen[str]
        pki.init(self.ca)
        pki.issue_operator(self.ca, "alice")
        for number in (1, 2, 3):
            pki.issue_node(self.ca, f"node-{number}")

    def host(self, number: int) -> Host:
        return list(self.hosts)[number - 1]

    @contextlib.contextmanager
    def serving(self, *numbers: int, users: str = "") -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            programs = []
            for number in numbers:
                state = self.folder / f"state-{number}"
                state.mkdir()
                argv = [sys.executable, "-m", "tests.net.peer_node", "serve", f"node-{number}", self.host(number).ip4]
                serving = self.host(number).program([*argv, str(state), str(self.ca), users], cwd=REPOSITORY)
                programs.append(stack.enter_context(serving))
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == "ready\n"
            argv = [sys.executable, "-m", "tests.net.peer_node", "ask", "node-2", self.hosts.h2.ip4, str(self.ca)]
            self.operator = stack.enter_context(self.hosts.h3.program(argv, cwd=REPOSITORY))
            yield

    @contextlib.contextmanager
    def connection(self, to: int, ip: str, user_id: int, own_ip: str = "") -> Iterator[tuple[Address, Address]]:
        """A connection of a process of a user on node-2: (its own address, where it leads)."""
        own_ip = own_ip or self.hosts.h2.ip4
        with self.host(to).python(ACCEPTS, ip, str(PORT)) as server:
            assert server.stdout.readline() == "ready\n"
            with self.hosts.h2.python(CONNECTS, ip, str(PORT), own_ip, str(user_id)) as caller:
                yield Address(own_ip, int(caller.stdout.readline())), Address(ip, PORT)

    def ask(self, method: str, old: Pair, new: Pair, *, move: int = 1, user_id: int = USER, ended: bool = False) -> str:
        """The answer of node-2. `old` and `new` are (the rank's address, that on node-2)."""
        endpoints = [f"{host.ip4}:{DAEMON_PORT}" for host in self.hosts]
        description = pb.MoveDescription(
            move=f"m-{move:012x}",
            rank_uid=f"job-0-{move:08x}",
            job="job",
            source_node="node-1",
            source_endpoint=endpoints[0],
            target_node="node-3",
            target_endpoint=endpoints[2],
            nonce=b"n" * 32,
            user_id=user_id,
        )
        rewire = pb.Rewire(
            kind=pb.Rewire.PEER,
            family="inet",
            old_local=_endpoint(old[0]),
            old_remote=_endpoint(old[1]),
            new_local=_endpoint(new[0]),
            new_remote=_endpoint(new[1]),
            peer_node="node-2",
            ended=ended,
        )
        request = pb.InspectConnectionsRequest if method == "InspectConnections" else pb.RepointRequest
        return self.call(method, request(description=description, rewires=[rewire]))

    def call(self, method: str, request: Message) -> str:
        """The answer of node-2 to an operator."""
        text = MessageToJson(request, indent=None)
        assert self.operator.stdin is not None
        assert self.operator.stdout is not None
        self.operator.stdin.write(f"{method} {text}\n")
        self.operator.stdin.flush()
        return self.operator.stdout.readline().strip()

    def leads_to(self, own: Address) -> Address | None:
        """Where the connection with this address on node-2 leads now."""
        rows: list[Flow] = self.hosts.h2.call(sockets._all_rows, {"tcp"})
        return next((row.remote for row in rows if row.local == own and row.connected), None)

    def refused(self, old: Pair, new: Pair, reason: str, *, user_id: int = USER) -> None:
        """No step of a move changes the connection, and preflight says so."""
        own, before, move = old[1], self.leads_to(old[1]), next(self.moves)
        assert before is not None
        for method in ("Repoint", "Hold", "SuspendTimeouts", "InspectConnections"):
            answer = self.ask(method, old, new, move=move, user_id=user_id)
            assert self.leads_to(own) == before, f"{method}: {answer}"
            assert reason in answer, method


def _endpoint(address: Address) -> pb.Endpoint:
    return pb.Endpoint(ip=address.ip, port=address.port)


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Cluster:
    return Cluster(hosts, tmp_path)


def test_connection_of_the_rank_is_re_pointed(cluster: Cluster) -> None:
    h1, _, h3 = (host.ip4 for host in cluster.hosts)
    with cluster.serving(1, 2, 3), cluster.connection(1, h1, USER) as (own, far):
        checks = json.loads(cluster.ask("InspectConnections", (far, own), (far.at(h3), own)))["checks"]
        assert [check["name"] for check in checks if check.get("verdict") == "REFUSE"] == []
        assert "sockets" in cluster.ask("SuspendTimeouts", (far, own), (far.at(h3), own))
        assert "sockets" in cluster.ask("Repoint", (far, own), (far.at(h3), own))
        assert cluster.leads_to(own) == far.at(h3)


def test_connection_to_another_node_is_not_redirected_to_the_source(cluster: Cluster) -> None:
    """The source names a connection of the same user to a data base on node-3 as the rank's, and itself as its target."""
    h1, _, h3 = (host.ip4 for host in cluster.hosts)
    with cluster.serving(1, 2, 3), cluster.connection(3, h3, USER) as (own, far):
        cluster.refused((far, own), (far.at(h1), own), "is not proved to be an address of node-")


def test_connection_to_the_source_is_not_redirected_past_the_target(cluster: Cluster) -> None:
    h1, h2, _ = (host.ip4 for host in cluster.hosts)
    with cluster.serving(1, 2, 3), cluster.connection(1, h1, USER) as (own, far):
        cluster.refused((far, own), (far.at(h2), own), f"{h2} is not proved to be an address of node-3")
        h3 = cluster.hosts.h3.ip4
        cluster.refused((far, own), (Address(h3, 22), own), "its ports would change")


def test_connection_inside_a_node_is_not_redirected(cluster: Cluster) -> None:
    """Two processes of node-2 itself, over loopback and over its own address; the source says that one is its rank."""
    h2, h3 = cluster.hosts.h2.ip4, cluster.hosts.h3.ip4
    with cluster.serving(1, 2, 3):
        with cluster.connection(2, "127.0.0.1", USER, "127.0.0.1") as (own, far):
            cluster.refused((far, own), (far.at(h3), own), "a loopback address is not that of another node")
            cluster.refused((far, own), (far.at(h3), own.at(h2)), "its address on this node would become")
        with cluster.connection(2, h2, USER) as (own, far):
            cluster.refused((far, own), (far.at(h3), own), f"{h2} is not proved to be an address of node-1")


def test_connection_of_another_user_is_not_redirected(cluster: Cluster) -> None:
    h1, _, h3 = (host.ip4 for host in cluster.hosts)
    with cluster.serving(1, 2, 3):
        for stranger in (STRANGER, 0):
            with cluster.connection(1, h1, stranger) as (own, far):
                cluster.refused((far, own), (far.at(h3), own), "not of the rank's user")
        with cluster.connection(1, h1, 0) as (own, far):  # node-2 does not allow ranks of root either
            cluster.refused((far, own), (far.at(h3), own), "not of the rank's user", user_id=0)


def test_connection_of_a_user_that_the_configuration_names_is_re_pointed(cluster: Cluster) -> None:
    """Such as that of a store that a system user runs for all jobs."""
    h1, _, h3 = (host.ip4 for host in cluster.hosts)
    with cluster.serving(1, 2, 3, users="root"), cluster.connection(1, h1, 0) as (own, far):
        assert "sockets" in cluster.ask("Repoint", (far, own), (far.at(h3), own))
        assert cluster.leads_to(own) == far.at(h3)


def test_certificate_may_name_addresses_where_the_daemon_does_not_listen(cluster: Cluster) -> None:
    """The daemons listen at IPv4 addresses; the rank uses IPv6. Only certificates can prove that these are the nodes'."""
    h1, h2, h3 = (host.ip6 for host in cluster.hosts)
    for number, names in ((1, [h1]), (3, [h3])):
        for kind in ("crt", "key"):
            os.unlink(cluster.ca / f"nodes/node-{number}.{kind}")
        pki.issue_node(cluster.ca, f"node-{number}", names)
    with cluster.serving(1, 2, 3), cluster.connection(1, h1, USER, h2) as (own, far):
        assert "sockets" in cluster.ask("Repoint", (far, own), (far.at(h3), own))
        assert cluster.leads_to(own) == far.at(h3)
