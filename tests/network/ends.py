"""Links for tests: two real ends, or one and a plain socket in place of the network process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from snapshotd.network.frames import FROM_DAEMON, FROM_NETWORK, Frame, Request, encode
from snapshotd.network.link import Call, Link

Serve = Callable[[Call], Awaitable[None]]


def request(number: int) -> Request:
    return Request(number, "/snapshotd.v1.Home/Relay", "root", "root", [])


async def echo(call: Call) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


async def refuse(call: Call) -> None:
    raise AssertionError("the daemon opens no calls in these tests")


@dataclass
class Pair:
    """Both ends, and why each one ended."""

    daemon: Link
    network: Link
    tasks: list[asyncio.Task[str]] = field(default_factory=list)

    def open(self) -> Call:
        """A call from outside."""
        return self.network.open(request)

    async def reasons(self) -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*self.tasks), 60)


@asynccontextmanager
async def pair(serve: Serve = echo) -> AsyncIterator[Pair]:
    ends = socket.socketpair()
    daemon = Link(FROM_NETWORK, serve, lambda frame: None, first=2)
    network = Link(FROM_DAEMON, refuse, lambda frame: None, first=1)
    made = Pair(daemon, network)
    for link, end in zip((daemon, network), ends, strict=True):
        await link.attach(end)
        made.tasks.append(asyncio.create_task(link.run()))
    try:
        yield made
    finally:
        daemon.close()
        network.close()
        await made.reasons()


@asynccontextmanager
async def raw(serve: Serve = echo) -> AsyncIterator[tuple[socket.socket, asyncio.Task[str]]]:
    """The daemon's end of a link, and a plain socket in place of the network process."""
    ours, theirs = socket.socketpair()
    daemon = Link(FROM_NETWORK, serve, lambda frame: None, first=2)
    await daemon.attach(ours)
    task = asyncio.create_task(daemon.run())
    theirs.setblocking(False)
    with theirs:
        yield theirs, task
    daemon.close()
    await asyncio.wait_for(asyncio.wait([task]), 60)


async def sent(end: socket.socket, *frames: Frame) -> None:
    await asyncio.get_running_loop().sock_sendall(end, b"".join(encode(frame) for frame in frames))


async def unread(call: Call) -> None:
    await asyncio.Event().wait()
