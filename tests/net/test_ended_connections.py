"""Connections that the peer has closed: the rank reads what had arrived, and then the end. One still in use is refused."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed
from snapshotd.criu.inet import Endpoints, rewrite
from snapshotd.moves import rules
from snapshotd.moves.rules import Outcome
from snapshotd.net import nft, sockets
from snapshotd.net.flows import Address, Flow
from snapshotd.net.sockets import borrow, own_addresses
from tests.net.hosts import Hosts
from tests.net.ranks import Rank, silence
from tests.net.test_repoint_attacks import PORT, USER, Cluster

pytestmark = pytest.mark.root

MOVE, NONCE = "m-000000000001", b"n" * 32
PATIENCE_S = 60.0
#: With each line of its input it does something to its end.
PEER = """
import os, socket, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
connection = socket.socket()
connection.connect((sys.argv[1], int(sys.argv[2])))
print(connection.getsockname()[1], flush=True)
for line in sys.stdin:
    if line == "forget\\n":
        connection.setsockopt(socket.IPPROTO_TCP, 8, 1)  # TCP_LINGER2: after a second
    connection.shutdown(socket.SHUT_WR) if line == "shutdown\\n" else connection.close()
    print("done", flush=True)
"""


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hosts, tmp_path)
    with made.serving(1, 2, 3):
        yield made


class Connection:
    """The rank's socket on node-1 and the process on node-2 that has the other one."""

    def __init__(self, cluster: Cluster, end: socket.socket, process: Any, own: Address) -> None:
        self.cluster, self.end, self.process, self.own = cluster, end, process, own
        self.far = Address(cluster.hosts.h1.ip4, PORT)

    def tell(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def state(self) -> str:
        """Of the peer's socket; "" if the kernel has forgotten it."""
        rows: list[Flow] = self.cluster.hosts.h2.call(sockets._all_rows, {"tcp"})
        return next((row.state for row in rows if row.local == self.own and row.connected), "")

    def ask(self, method: str, *, ended: bool) -> str:
        new = self.far.at(self.cluster.hosts.h3.ip4)
        return self.cluster.ask(method, (self.far, self.own), (new, self.own), ended=ended)


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[Connection]:
    here, there = cluster.hosts.h1, cluster.hosts.h2
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(here.call(socket.create_server, (here.ip4, PORT)))
        process = stack.enter_context(there.python(PEER, here.ip4, str(PORT), str(USER)))
        own = Address(there.ip4, int(process.stdout.readline()))
        yield Connection(cluster, stack.enter_context(server.accept()[0]), process, own)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connection_that_a_process_may_still_read_is_refused(connection: Connection) -> None:
    connection.tell("shutdown")
    for method in ("InspectConnections", "Hold", "Repoint"):
        assert "half-closed: the rank reads no more" in connection.ask(method, ended=True), method


@pytest.mark.parametrize("forgotten", [False, True])
def test_connection_that_no_process_has_is_no_problem(connection: Connection, forgotten: bool) -> None:
    """The kernel forgets it after a while."""
    connection.tell("forget" if forgotten else "close")
    until(lambda: connection.state() in ("", "fin-wait-2") and (not forgotten or not connection.state()))
    assert "REFUSE" not in connection.ask("InspectConnections", ended=True)
    for method in ("SuspendTimeouts", "Hold", "Repoint"):
        assert connection.ask(method, ended=True) in ("{}", '{"sockets": 0}'), method
    token = rules.proof(NONCE, Outcome.COMMIT, MOVE)
    assert "true" in connection.cluster.call("Settle", pb.TokenRequest(move=MOVE, token=token))
    assert connection.cluster.hosts.h2.call(nft.tables) == []


def test_connection_closed_during_the_freeze_asks_for_another_attempt(connection: Connection) -> None:
    assert "sockets" in connection.ask("Hold", ended=False)
    connection.tell("close")
    assert connection.state() == "fin-wait-1"
    for method in ("Hold", "Repoint"):
        answer = connection.ask(method, ended=False)
        assert answer.startswith(f"{Changed.code}: "), answer
        assert "closed while the rank was frozen" in answer


def test_connection_closed_since_the_rank_was_looked_at_is_no_problem_for_preflight(connection: Connection) -> None:
    """The rank runs, so that it learns it, and the freeze sees it."""
    connection.tell("close")
    assert "REFUSE" not in connection.ask("InspectConnections", ended=False)


def test_connection_through_a_node_is_refused(cluster: Cluster) -> None:
    """As to a container there: the process that has it is in another network namespace."""
    h1, h2, h3 = cluster.hosts
    h2.call(Path("/proc/sys/net/ipv4/ip_forward").write_text, "1")
    rules_of_nat = [
        "add table ip nat",
        "add chain ip nat there { type nat hook prerouting priority -100 ; }",
        "add chain ip nat back { type nat hook postrouting priority 100 ; }",
        f"add rule ip nat there tcp dport 7777 dnat to {h3.ip4}:{PORT}",
        "add rule ip nat back masquerade",
    ]
    h2.call(nft.apply, "".join(f"{rule}\n" for rule in rules_of_nat))
    try:
        with h3.call(socket.create_server, (h3.ip4, PORT)) as server:
            end = h1.call(socket.create_connection, (h2.ip4, 7777), PATIENCE_S)
            with end, server.accept()[0] as far:
                far.shutdown(socket.SHUT_WR)
                assert end.recv(1) == b""
                rank, peer = Address(*end.getsockname()), Address(*end.getpeername())
                answer = cluster.ask("Hold", (rank, peer), (rank.at(h3.ip4), peer), ended=True)
                assert "passed on by this node" in answer
    finally:
        h2.call(nft.apply, "delete table ip nat\n")
        h2.call(Path("/proc/sys/net/ipv4/ip_forward").write_text, "0")


@pytest.mark.parametrize("read_before", [False, True])
async def test_moved_rank_reads_what_had_arrived_and_then_the_end(hosts: Hosts, rank: Rank, read_before: bool) -> None:
    with contextlib.ExitStack() as keep:
        server = keep.enter_context(hosts.h3.call(socket.create_server, (hosts.h3.ip4, 0)))
        client = keep.enter_context(hosts.h1.call(socket.create_connection, server.getsockname()))
        with server.accept()[0] as far:
            far.sendall(b"last words")
        flags = socket.MSG_WAITALL | (0 if read_before else socket.MSG_PEEK)
        assert client.recv(len(b"last words"), flags) == b"last words"
        poll = select.poll()
        poll.register(client, select.POLLRDHUP)
        assert poll.poll(1000 * PATIENCE_S), "the end has not arrived"
        silent = keep.enter_context(hosts.h1.call(socket.create_server, ("127.0.0.1", 0)))
        number, pair = client.fileno(), (Address(*client.getsockname()), Address(*client.getpeername()))
        await rank.dump(hosts.h1, silent, client)
        changes: dict[Endpoints, Endpoints] = {pair: (pair[0].at(hosts.h2.ip4), pair[1])}
        (place,) = rewrite(rank.images, changes, own=hosts.h2.call(own_addresses), ended=[pair]).ended
        hosts.h2.call(silence, hosts.h3)
        await rank.restore(hosts.h2)
        assert place == (rank.pid, number)
        with borrow(rank.holder(number)) as sock:
            sock.shutdown(socket.SHUT_RD)
            poll = select.poll()
            poll.register(sock, select.POLLIN | select.POLLRDHUP)
            assert poll.poll(0) == [(sock.fileno(), select.POLLIN | select.POLLRDHUP)]
            assert sock.recv(100) == (b"" if read_before else b"last words")
            assert sock.recv(100) == b""
