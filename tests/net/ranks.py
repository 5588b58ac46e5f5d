"""A process with sockets, dumped by the real CRIU on one host and restored on another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pycriu import rpc_pb2 as rpc
from pyroute2 import IPRoute

from snapshotd.api.errors import Where
from snapshotd.criu.session import _LIMITS, ask, dump_request, restore_request, swrk_pair
from snapshotd.net.flows import Address, Holder
from snapshotd.proc.tree import Process, stopped
from tests.net.hosts import REPOSITORY, Host

CRIU = REPOSITORY / ".criu" / "criu"
needs_criu = pytest.mark.skipif(not CRIU.exists(), reason="no CRIU of our own: run `make setup`")

#: Prints what it sees on its first descriptor, then waits.
RANK = """
import os, select, signal, socket, sys
def meet(what):
    try:
        return repr(what())
    except OSError as error:
        return type(error).__name__
watched = socket.socket(fileno=int(sys.argv[1]))
registered = select.epoll()
registered.register(watched, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
print("ready", flush=True)
events = []
while not events:
    events = registered.poll()
print(events[0][1] & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP),
      *[meet(lambda: watched.recv(1)), meet(lambda: watched.recv(1)), meet(lambda: watched.send(b"x"))], flush=True)
signal.pause()
"""


def address(name: Any) -> Address:
    return Address(name[0], name[1])


async def _criu(host: Host, request: rpc.criu_req, images: Path, log: str) -> int:
    """Sends one request to a criu inside `host`; returns the pid of a restore."""
    ours, theirs = swrk_pair()
    preload = str(_LIMITS) if _LIMITS.exists() else ""
    criu = subprocess.Popen(
        host.argv(str(CRIU), "swrk", str(theirs.fileno())),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SNAPSHOT_CRIU_PRELOAD": preload},
    )
    theirs.close()

    async def ignore(_script: str, _pid: int) -> None:
        pass

    try:
        with ours:
            answer = await ask(
                ours, request, log_path=images / log, timeout_s=30, where=Where.UNTOUCHED, on_notify=ignore
            )
    finally:
        await asyncio.to_thread(criu.wait, 10)
    return int(answer.restore.pid)


class Rank:
    """A stopped process with sockets of h1, its image, and its copy on another host."""

    def __init__(self, folder: Path) -> None:
        self.images, self.output = folder / "images", folder / "output"
        self.images.mkdir(mode=0o700)
        self.output.touch()
        self.pid = 0

    async def dump(self, host: Host, watched: socket.socket, *others: socket.socket) -> None:
        """Starts it with these sockets, which only it then holds, and dumps it without a packet."""
        numbers = [sock.fileno() for sock in (watched, *others)]
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                host.argv(sys.executable, "-c", RANK, *map(str, numbers)),
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        for sock in (watched, *others):
            sock.close()
        self.until(lambda: "ready" in self.output.read_text())
        process.send_signal(signal.SIGSTOP)
        self.until(lambda: stopped(process.pid))
        request = dump_request(self.images, process.pid, Path(), [])
        request.opts.ClearField("freeze_cgroup")
        request.opts.leave_running = False
        request.opts.tcp_established = True
        try:
            await _criu(host, request, self.images, "dump.log")
        finally:
            process.kill()
            process.wait()

    async def restore(self, host: Host) -> None:
        request = restore_request(self.images, [])
        request.opts.tcp_established = True
        self.pid = await _criu(host, request, self.images, "restore.log")

    def holder(self, number: int) -> Holder:
        return Holder(self.pid, Process.of(self.pid).start_ticks, number)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.002)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def listen(keep: contextlib.ExitStack, host: Host, ip: str, **options: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return keep.enter_context(host.call(lambda: socket.create_server((ip, 0), family=family, **options)))


def connect(
    keep: contextlib.ExitStack, host: Host, server: socket.socket, ip: str
) -> tuple[socket.socket, socket.socket]:
    client = keep.enter_context(host.call(socket.create_connection, (ip, server.getsockname()[1]), 2.0))
    return client, keep.enter_context(server.accept()[0])


def silence(other: Host) -> None:
    """Sends packets to the other host to an unused hardware address: the other host would answer with a reset."""
    with IPRoute() as netlink:
        cable = netlink.link_lookup(ifname="eth0")[0]
        for family, ip in ((socket.AF_INET, other.ip4), (socket.AF_INET6, other.ip6)):
            netlink.neigh(
                "replace", family=family, dst=ip, lladdr="02:00:00:00:00:00", ifindex=cable, state="permanent"
            )
