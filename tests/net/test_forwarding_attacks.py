"""Attacks through the forwarding of a moved rank's addresses: by another node, by other users of the node that was left."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from migrator import pki
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry, Ranks
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.net import forward
from snapshotd.net.flows import Address
from snapshotd.proc import host as this_host
from tests.net.forwarding_node import PORT as DAEMON_PORT
from tests.net.hosts import REPOSITORY, Host, Hosts

pytestmark = pytest.mark.root

PROGRAM = Path(__file__).with_name("forwarding_node.py")
UID, PORT = "job-0-0a1b2c3d", 29500
USER, STRANGER = 1500, 1501
ANSWERS = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    while True:
        connection = server.accept()[0]
        connection.sendall(sys.argv[3].encode())
        connection.close()
"""
CALLS = """
import os, socket, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
try:
    with socket.socket() as connection:
        connection.settimeout(5)
        connection.connect((sys.argv[1], int(sys.argv[2])))
        print(connection.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""
BINDS = """
import os, socket, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    with socket.socket() as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            server.bind((sys.argv[1], int(sys.argv[2])))
            server.listen()
            print("bound")
        except OSError as error:
            print(error.errno)
"""


class Cluster:
    """h1, h2 and h3 as the nodes node-1, node-2 and node-3 with a CA."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.ca = folder / "ca"
        pki.init(self.ca)
        for number in (1, 2, 3):
            pki.issue_node(self.ca, f"node-{number}")

    def host(self, number: int) -> Host:
        return list(self.hosts)[number - 1]

    def state(self, number: int) -> Path:
        folder = self.folder / f"state-{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def moved(self, source: int, target: int, *, move: int = 1, user_id: int = USER, listens: str = "0.0.0.0") -> None:
        """Journals on both nodes that the rank has moved, and listened at PORT."""
        for role, number, mark in (("source", source, Mark.SETTLED), ("target", target, Mark.ACTIVATED)):
            log = Journal(self.state(number)).begin(
                Begin(
                    move=f"m-{move:012x}",
                    role=role,
                    rank_uid=UID,
                    job="job",
                    rank=0,
                    source_node=f"node-{source}",
                    source_endpoint=f"{self.host(source).ip4}:{DAEMON_PORT}",
                    target_node=f"node-{target}",
                    target_endpoint=f"{self.host(target).ip4}:{DAEMON_PORT}",
                    nonce="00",
                    boot_id=this_host.boot_id(),
                    begun_unix_s=float(move),
                )
            )
            listener = pb.Rewire(kind=pb.Rewire.LISTENER, old_local=pb.Endpoint(ip=listens, port=PORT))
            log.decide(Outcome.COMMIT, "test", "test")
            log.mark(mark, rewires=[listener] if role == "source" else [])

    def at_home(self, number: int, away: int) -> None:
        Ranks(self.state(number)).put(
            RankEntry(
                uid=UID,
                job="job",
                rank=0,
                role="home",
                keeper_pid=1,
                keeper_start_ticks=1,
                cgroup="/nowhere",
                home_node=f"node-{number}",
                home_endpoint="",
                relay_key="key",
                boot_id=this_host.boot_id(),
                user_id=USER,
                away_node=f"node-{away}",
            )
        )

    @contextlib.contextmanager
    def serving(self, number: int) -> Iterator[subprocess.Popen[str]]:
        host = self.host(number)
        argv = [sys.executable, "-m", "tests.net.forwarding_node", "serve", f"node-{number}", host.ip4]
        with host.program([*argv, str(self.state(number)), str(self.ca)], cwd=REPOSITORY) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            yield program

    def ask(self, by: int, server: int, forwardings: dict[str, str], *, moves: int = 1, home: int = 1) -> str:
        """The answer to a Forward with the certificate of node `by`, sent from that node."""
        nodes = [
            pb.NodeAddresses(
                name=f"node-{n}", endpoint=f"{self.host(n).ip4}:{DAEMON_PORT}", addresses=[self.host(n).ip4]
            )
            for n in (1, 2, 3)
        ]
        request = pb.ForwardRequest(rank_uid=UID, moves=moves, nodes=nodes, home_node=f"node-{home}")
        for old, new in forwardings.items():
            ends = [Address.parse(text) for text in (old, new)]
            old_address, new_address = (pb.Endpoint(ip=end.ip, port=end.port) for end in ends)
            request.forwardings.append(pb.Forwarding(old_address=old_address, new_address=new_address))
        return self.send(by, server, request)

    def send(self, by: int, server: int, request: pb.ForwardRequest) -> str:
        argv = [sys.executable, "-m", "tests.net.forwarding_node", "forward", f"node-{by}", f"node-{server}"]
        done = subprocess.run(
            self.host(by).argv(*argv, self.host(server).ip4, str(self.ca)),
            input=MessageToJson(request),
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            check=True,
        )
        return done.stdout.strip()

    def forwarded(self, number: int) -> dict[Address, Address]:
        return self.host(number).call(forward.forwarded, UID)

    @contextlib.contextmanager
    def answering(self, number: int, ip: str, port: int, text: str) -> Iterator[None]:
        with self.host(number).python(ANSWERS, ip, str(port), text) as program:
            assert program.stdout.readline() == "ready\n"
            yield

    def heard(self, number: int, ip: str, port: int, user_id: int = USER) -> str:
        """What a user of a node receives after connecting to an address."""
        with self.host(number).python(CALLS, ip, str(port), str(user_id)) as program:
            return str(program.stdout.read()).strip()


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Cluster:
    return Cluster(hosts, tmp_path)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_compromised_node_gets_no_connections_to_a_local_service(cluster: Cluster) -> None:
    """With node-3's certificate: connections of node-1's users to their own data base are to go to node-3."""
    evil = f"{cluster.hosts.h3.ip4}:5432"
    with (
        cluster.serving(1),
        cluster.answering(1, "127.0.0.1", 5432, "data base"),
        cluster.answering(3, cluster.hosts.h3.ip4, 5432, "attacker"),
    ):
        assert "no rank job-0-0a1b2c3d has left node node-1" in cluster.ask(3, 1, {"127.0.0.1:5432": evil})
        assert cluster.heard(1, "127.0.0.1", 5432) == "data base"
        assert cluster.forwarded(1) == {}


def test_compromised_node_gets_no_connections_to_another_node(cluster: Cluster) -> None:
    """With node-3's certificate: connections of node-1's users to a service on node-2 are to go to node-3."""
    evil, service = f"{cluster.hosts.h3.ip4}:22", f"{cluster.hosts.h2.ip4}:22"
    with (
        cluster.serving(1),
        cluster.serving(2),
        cluster.serving(3),
        cluster.answering(2, cluster.hosts.h2.ip4, 22, "node-2"),
        cluster.answering(3, cluster.hosts.h3.ip4, 22, "evil"),
    ):
        assert "has left node node-2" in cluster.ask(3, 1, {service: evil})
        assert cluster.heard(1, cluster.hosts.h2.ip4, 22) == "node-2"
        # It names itself as the node with that address, or its own daemon as that node's.
        for name, endpoint in (("node-3", cluster.hosts.h3.ip4), ("node-2", cluster.hosts.h3.ip4)):
            claimed = pb.NodeAddresses(
                name=name, endpoint=f"{endpoint}:{DAEMON_PORT}", addresses=[cluster.hosts.h2.ip4]
            )
            request = pb.ForwardRequest(rank_uid=UID, moves=1, nodes=[claimed])
            request.forwardings.add(
                old_address=pb.Endpoint(ip=cluster.hosts.h2.ip4, port=22),
                new_address=pb.Endpoint(ip=cluster.hosts.h3.ip4, port=22),
            )
            assert cluster.send(3, 1, request) != "done"
        assert cluster.forwarded(1) == {}
        assert cluster.heard(1, cluster.hosts.h2.ip4, 22) == "node-2"


def test_node_that_does_not_have_the_rank_is_refused(cluster: Cluster) -> None:
    cluster.moved(1, 2)
    cluster.at_home(1, away=2)
    old = f"{cluster.hosts.h1.ip4}:{PORT}"
    with cluster.serving(1), cluster.serving(2), cluster.serving(3):
        assert cluster.ask(3, 1, {old: f"{cluster.hosts.h3.ip4}:{PORT}"}) != "done"
        assert cluster.ask(3, 2, {old: f"{cluster.hosts.h3.ip4}:{PORT}"}) != "done"
        assert cluster.forwarded(1) == cluster.forwarded(2) == {}


def test_node_that_has_the_rank_gets_only_its_own_addresses(cluster: Cluster) -> None:
    cluster.moved(1, 2)
    cluster.at_home(1, away=2)
    h1, h2 = cluster.hosts.h1.ip4, cluster.hosts.h2.ip4
    with cluster.serving(1), cluster.serving(3):
        for address in (f"{h1}:22", "127.0.0.1:22"):
            answer = cluster.ask(2, 1, {f"{h1}:{PORT}": f"{h2}:{PORT}", address: f"{h2}:22"})
            assert f"did not listen at {address} when it left node node-1" in answer
        assert "did not listen at" in cluster.ask(2, 3, {f"{h1}:22": f"{h2}:22"})
        assert cluster.forwarded(1) == cluster.forwarded(3) == {}


def test_genuine_addresses_are_forwarded_everywhere(cluster: Cluster) -> None:
    cluster.moved(1, 2)
    cluster.at_home(1, away=2)
    h1, h2 = cluster.hosts.h1.ip4, cluster.hosts.h2.ip4
    wanted = {f"{h1}:{PORT}": f"{h2}:{PORT}"}
    with cluster.serving(1), cluster.serving(3), cluster.answering(2, h2, PORT, "rank"):
        assert cluster.ask(2, 1, {**wanted, f"127.0.0.1:{PORT}": f"{h2}:{PORT}"}) == "done"
        assert cluster.ask(2, 3, wanted) == "done"
        assert cluster.heard(1, h1, PORT) == cluster.heard(1, "127.0.0.1", PORT) == cluster.heard(3, h1, PORT) == "rank"
        for stranger in (3, 1):  # node-1 is its home, and may end it
            answer = cluster.ask(stranger, 1, {})
            assert ("may not end its forwardings" in answer) is (stranger == 3)
        assert cluster.forwarded(1) == {}
        assert cluster.ask(2, 3, {}) == "done"
        assert cluster.forwarded(3) == {}


def test_rank_is_followed_over_several_nodes(cluster: Cluster) -> None:
    cluster.moved(1, 3, move=1)
    cluster.moved(3, 2, move=2)
    h1, h2, h3 = (host.ip4 for host in cluster.hosts)
    both = {f"{h1}:{PORT}": f"{h2}:{PORT}", f"{h3}:{PORT}": f"{h2}:{PORT}"}
    with cluster.serving(1):
        assert "could not be reached" in cluster.ask(2, 1, both, moves=2)  # node-3 would have to confirm it
        assert cluster.forwarded(1) == {}
        with cluster.serving(3):
            assert cluster.ask(2, 1, both, moves=2) == "done"
            assert {str(old) for old in cluster.forwarded(1)} == set(both)
        assert cluster.ask(2, 1, both, moves=2) == "done", "what was confirmed once need not be confirmed again"
        late = cluster.ask(3, 1, {f"{h1}:{PORT}": f"{h3}:{PORT}"}, moves=1)
        assert {str(new) for new in cluster.forwarded(1).values()} == {f"{h2}:{PORT}"}, late


def test_node_that_a_rank_came_back_from_is_refused(cluster: Cluster) -> None:
    cluster.moved(1, 3, move=1)
    cluster.moved(3, 1, move=2)
    with cluster.serving(1), cluster.serving(3):
        old = f"{cluster.hosts.h1.ip4}:{PORT}"
        assert "has come back to node node-1" in cluster.ask(3, 1, {old: f"{cluster.hosts.h3.ip4}:{PORT}"}, moves=3)


def test_port_of_a_moved_listener_cannot_be_bound_by_another_user(cluster: Cluster) -> None:
    """Otherwise connections to a service of that user would go to the rank."""
    cluster.moved(1, 2)
    cluster.at_home(1, away=2)
    h1, h2 = cluster.hosts.h1.ip4, cluster.hosts.h2.ip4
    wanted = {f"{h1}:{PORT}": f"{h2}:{PORT}", f"127.0.0.1:{PORT}": f"{h2}:{PORT}"}
    with cluster.answering(2, h2, PORT, "rank"):
        with cluster.serving(1):
            assert cluster.ask(2, 1, wanted) == "done"
            for ip in (h1, "127.0.0.1", "0.0.0.0"):
                with cluster.hosts.h1.python(BINDS, ip, str(PORT), str(STRANGER)) as program:
                    assert program.stdout.read().split() == [str(errno.EADDRINUSE)] * 4, ip
            # A host without a daemon, whose connections are not forwarded, still gets a refusal.
            assert cluster.heard(3, h1, PORT) == "ConnectionRefusedError"
            assert cluster.heard(1, h1, PORT) == "rank"
        # While no daemon ran, another user got the port: the next daemon leaves it to that user.
        with cluster.answering(1, h1, PORT, "stranger"), cluster.serving(1):
            until(lambda: cluster.heard(1, h1, PORT) == "stranger")
            assert cluster.heard(3, h1, PORT) == "stranger"
            assert cluster.heard(1, "127.0.0.1", PORT) == "rank"


def test_loopback_is_forwarded_for_the_user_of_the_rank_alone(cluster: Cluster) -> None:
    cluster.moved(1, 2)
    cluster.at_home(1, away=2)
    h2 = cluster.hosts.h2.ip4
    with cluster.serving(1), cluster.answering(2, h2, PORT, "rank"):
        assert cluster.ask(2, 1, {f"127.0.0.1:{PORT}": f"{h2}:{PORT}"}) == "done"
        assert cluster.heard(1, "127.0.0.1", PORT, STRANGER) == "ConnectionRefusedError"
        assert cluster.heard(1, "127.0.0.1", PORT, USER) == "rank"


def test_port_is_held_once_the_copy_that_was_left_is_gone(cluster: Cluster) -> None:
    """The node that has the rank now says so before the node that it left has dropped its frozen copy."""
    cluster.moved(1, 2)
    log = Journal(cluster.state(1)).get("m-000000000001")
    log.mark(Mark.STREAMED)
    h1, h2 = cluster.hosts.h1.ip4, cluster.hosts.h2.ip4
    with cluster.answering(2, h2, PORT, "rank"), cluster.serving(1):
        with cluster.answering(1, h1, PORT, "frozen copy"):
            assert cluster.ask(2, 1, {f"{h1}:{PORT}": f"{h2}:{PORT}"}) == "done"
            assert cluster.heard(1, h1, PORT) == "rank"

        def held() -> bool:
            with contextlib.suppress(OSError), cluster.hosts.h1.call(socket.create_server, (h1, PORT)):
                return False
            return True

        until(held)
        assert cluster.heard(1, h1, PORT) == "rank"
