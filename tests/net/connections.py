"""A connection whose peer socket an idle process holds; the test acts as its application."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snapshotd.net import repair, repoint
from snapshotd.net.flows import Holder, Pair
from snapshotd.net.repoint import Change
from snapshotd.proc.tree import Process
from tests.net.hosts import Host, Hosts
from tests.net.moving import hold, put_on, release, take_off

KEEPER = """
import socket, sys
held = socket.socket(fileno=int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
"""


class Connection:
    """A connection whose peer socket is held by an idle process and by the test, which acts as its application."""

    def __init__(self, peer: socket.socket, rank: socket.socket, process: subprocess.Popen[str], folder: Path) -> None:
        self.peer, self.rank, self.process = peer, rank, process
        self.inode = os.fstat(peer.fileno()).st_ino
        owner = Process.of(process.pid)
        self.holders = (Holder(owner.pid, owner.start_ticks, peer.fileno()),)
        self.state_path = folder / str(self.inode)

    @property
    def endpoints(self) -> Pair:
        found = repair.pair(self.peer)
        assert found is not None
        return found

    def change(self, endpoints: Pair) -> Change:
        return Change(self.holders, self.inode, *endpoints, self.state_path)

    def echo(self) -> None:
        """Checks that both directions work."""
        for writer, reader in ((self.peer, self.rank), (self.rank, self.peer)):
            reader.settimeout(60)
            writer.sendall(b"ping")
            assert reader.recv(4, socket.MSG_WAITALL) == b"ping"
            reader.settimeout(None)


@contextlib.contextmanager
def connected(
    folder: Path, peer: Host, rank: Host, *, listen: str, to: str, peer_listens: bool = True, before: Any = None
) -> Iterator[Connection]:
    kind = socket.AF_INET6 if ":" in listen else socket.AF_INET
    here, there = (peer, rank) if peer_listens else (rank, peer)
    with contextlib.ExitStack() as stack:
        listener = here.call(socket.create_server, (listen, 0), family=kind, dualstack_ipv6=kind == socket.AF_INET6)
        stack.enter_context(listener)
        caller = there.call(socket.socket, socket.AF_INET6 if ":" in to else socket.AF_INET)
        if before:
            before(caller)
        caller.connect((to, listener.getsockname()[1]))
        answerer = stack.enter_context(listener.accept()[0])
        stack.enter_context(caller)
        endpoints = (answerer, caller) if peer_listens else (caller, answerer)
        os.set_inheritable(endpoints[0].fileno(), True)
        argv = [sys.executable, "-I", "-c", KEEPER, str(endpoints[0].fileno())]
        process = stack.enter_context(peer.program(argv, pass_fds=(endpoints[0].fileno(),)))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        held = Connection(*endpoints, process, folder)
        stack.callback(lambda: held.rank.close())
        yield held


def move_rank(held: Connection, hosts: Hosts, target: Host, endpoints: Pair) -> None:
    """Moves the rank's socket to `target`, and re-points the peer's."""
    everyone = list(hosts)
    hold(everyone, held.endpoints, endpoints)
    state, family = take_off(held.rank), held.rank.family
    hosts.h1.call(repoint.repoint_all, [held.change(endpoints)])
    held.rank = target.call(put_on, state, family, (endpoints[1], endpoints[0]))
    release(everyone)
