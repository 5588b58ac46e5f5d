"""Moves one socket of a connection between hosts, as the daemons and CRIU do, so that its peer can be re-pointed."""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.net import filter as packets
from snapshotd.net import repair, socket_state, sockets
from snapshotd.net.flows import Flow, Pair
from snapshotd.net.rebuild import rebuild
from snapshotd.net.repoint import Change
from tests.descriptors import open_links
from tests.net.hosts import REPOSITORY, Host
from tests.net.talker import TOTAL_BYTES, half

MOVE = "m-0123456789ab"


def digest(seed: int) -> str:
    return hashlib.sha256(half(seed)).hexdigest()


@dataclass
class Talk:
    """A connection between the test, which acts as the rank, and a talker, which acts as a peer."""

    peer: subprocess.Popen[str]
    rank: socket.socket
    sent_bytes: int = 0

    def line(self) -> str:
        assert self.peer.stdout is not None
        return self.peer.stdout.readline().strip()

    def tell(self) -> None:
        assert self.peer.stdin is not None
        self.peer.stdin.write("\n")
        self.peer.stdin.flush()

    def fill(self) -> None:
        """Sends until the queues of this direction are full."""
        rest = memoryview(half(2))[self.sent_bytes :]
        self.rank.settimeout(0.15)
        with contextlib.suppress(TimeoutError):
            while rest:
                count = self.rank.send(rest)
                rest, self.sent_bytes = rest[count:], self.sent_bytes + count

    def finish(self) -> None:
        """Exchanges the rest. Each side has then read exactly what the other wrote."""
        self.tell()
        self.rank.settimeout(30)
        read, left, rest = hashlib.sha256(), TOTAL_BYTES, memoryview(half(2))[self.sent_bytes :]
        while left or rest:
            readable, writable, _ = select.select([self.rank] if left else [], [self.rank] if rest else [], [], 30)
            assert readable or writable, f"no progress: {left} to read, {len(rest)} to write"
            if readable:
                data = self.rank.recv(min(left, 1 << 16))
                assert data, "end of file"
                read.update(data)
                left -= len(data)
            if writable:
                rest = rest[self.rank.send(rest[: 1 << 16], socket.MSG_DONTWAIT) :]
        assert read.hexdigest() == digest(1)
        assert self.line() == f"done {digest(2)}"


@contextlib.contextmanager
def talk(style: str, family: str, peer: Host, rank: Host, *, peer_listens: bool, ip: str, to: str) -> Iterator[Talk]:
    """`ip`: where the listener binds; `to`: where the other connects."""
    kind = socket.AF_INET6 if ":" in (to if peer_listens else ip) else socket.AF_INET
    argv = [sys.executable, "-m", "tests.net.talker", style, family]
    with contextlib.ExitStack() as stack:
        if peer_listens:
            process = stack.enter_context(peer.program([*argv, ip, "0"], cwd=REPOSITORY))
            assert process.stdout is not None
            port = int(process.stdout.readline())
            end = rank.call(socket.create_connection, (to, port))
        else:
            listener = stack.enter_context(rank.call(socket.create_server, (ip, 0), family=kind))
            process = stack.enter_context(peer.program([*argv, to, str(listener.getsockname()[1])], cwd=REPOSITORY))
            end = listener.accept()[0]
        conversation = Talk(process, end)
        try:
            yield conversation
        finally:
            conversation.rank.close()


def peer_flow(host: Host, rank: socket.socket) -> Flow:
    """The talker's socket of the rank's connection."""
    endpoints = repair.pair(rank)
    assert endpoints is not None
    return host.call(sockets.find_peers, [endpoints])[endpoints]


def change(flow: Flow, endpoints: Pair, folder: Path) -> Change:
    return Change(flow.holders, flow.inode, *endpoints, folder / str(flow.inode))


def take_off(rank: socket.socket) -> socket_state.SocketState:
    """What CRIU does on the source: reads the state and closes the socket without a packet."""
    begun = socket_state.begin(rank)
    repair.enter(rank)
    state = socket_state.capture(rank, begun)
    rank.close()
    return state


def put_on(state: socket_state.SocketState, family: int, endpoints: Pair) -> socket.socket:
    """What CRIU does on the target. In the target's network namespace."""
    sock = socket.socket(family)
    rebuild(sock, state, endpoints)
    return sock


def hold(hosts: list[Host], *pairs: Pair) -> None:
    for host in hosts:
        host.call(packets.hold, MOVE, pairs)


def release(hosts: list[Host]) -> None:
    for host in hosts:
        host.call(packets.drop_table, MOVE)


def visible(pid: int) -> dict[str, str]:
    """What a process can see of its descriptors: their files, and the registrations of each epoll instance."""
    seen = {}
    for number, link in open_links(pid).items():
        registered = Path(f"/proc/{pid}/fdinfo/{number}").read_text() if "eventpoll" in link else ""
        seen[str(number)] = link + registered
    return seen
