"""The keepers on this node: a unix socket that anyone may connect to, one link per connected keeper.

Invariants: a frame that makes no sense closes the link it came on and nothing else. A keeper's link may come and go
(either side may restart) without the rank noticing; `closed(link, False)` comes exactly once per keeper, when its
process has really ended. Events of one link are told in order, beside its reading: a listener may ask the keeper things.

What is said over a link is listed in shim/README.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from shim.keeper.frames import RELAY_TYPES, Decoder, Frame, FrameError, encode
from snapshotd.api.errors import RankGone, SnapshotError, Usage
from snapshotd.keepers.hello import Hello, Inherit, parse_hello, peer_of, rank_process
from snapshotd.keepers.link import KeeperLink
from snapshotd.proc.tree import Process

__all__ = ["Adopt", "Hello", "Inherit", "KeeperEvents", "KeeperLink", "KeeperLinks", "Welcome"]

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
MAX_LINKS = 4096


@dataclass(frozen=True)
class Welcome:
    """The answer to a hello: the rank's uid, and this node as others name and reach it."""

    uid: str
    node: str
    endpoint: str


#: Makes the cgroup, puts the rank in it, enters it in the registry. A SnapshotError refuses the keeper.
Adopt = Callable[[Hello, Process, Process | None], Awaitable[Welcome]]


@dataclass(frozen=True)
class KeeperEvents:
    """What the registry wants to hear.

    connected: welcomed (again); told before anything else of this link.
    closed:    (link, keeper_alive). True: it will be back by itself (not told if it is back at once). False: the keeper's
               process has ended; comes alone or after a True, exactly once.
    exited:    (link, wait status): the rank's end. The keeper is then answered `bye` and goes.
    died:      (link, move, wait status): the local process ended while held; the keeper waits for resume or away.
    """

    connected: Callable[[KeeperLink], Awaitable[None]]
    closed: Callable[[KeeperLink, bool], Awaitable[None]]
    exited: Callable[[KeeperLink, int], Awaitable[None]]
    died: Callable[[KeeperLink, str, int], Awaitable[None]]


_Event = Callable[[], Awaitable[None]]


class KeeperLinks:
    """The server on keeper.sock, and every keeper that is connected to it."""

    def __init__(self, path: Path, adopt: Adopt, events: KeeperEvents) -> None:
        self.path = path
        self._adopt = adopt
        self._events = events
        self._server: asyncio.Server | None = None
        self._links: dict[Process, KeeperLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Listens; the socket file appears complete (bound, mode 0666) under its name."""
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(fresh))
        listener.listen(1024)
        fresh.chmod(0o666)
        fresh.rename(self.path)
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def stop(self) -> None:
        """Closes all links. The keepers go on and look for the next daemon; nothing is told about them any more."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def all(self) -> list[KeeperLink]:
        return list(self._links.values())

    def find(self, uid: str, role: str) -> KeeperLink | None:
        """The connected keeper of a rank. A rank that came back to its home node has a home and a guest keeper here."""
        return next((link for link in self._links.values() if (link.uid, link.role) == (uid, role)), None)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: one made by asyncio's server is logged as an error when stop() cancels it.
        task = asyncio.create_task(self._accept(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._tasks) > MAX_LINKS:
                raise Usage(f"more than {MAX_LINKS} keepers on one node")
            await self._serve(reader, writer)
        except (FrameError, SnapshotError) as error:
            log.warning("a keeper's link is closed: %s", error)
        except OSError as error:  # TimeoutError too
            log.info("a keeper's link is lost: %s", str(error) or type(error).__name__)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming = _frames(reader)
        keeper, user_id = peer_of(writer.get_extra_info("socket"))
        pidfd = os.pidfd_open(keeper.pid)  # from before the check below: it cannot be of another process
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(incoming, None)
            if first is None or not keeper.alive():
                return
            link = await self._welcome(first, keeper, user_id, writer)
            if link is not None:
                await self._follow(link, incoming, pidfd)
        finally:
            os.close(pidfd)

    async def _welcome(
        self, first: Frame, keeper: Process, user_id: int, writer: asyncio.StreamWriter
    ) -> KeeperLink | None:
        try:
            hello = parse_hello(first, user_id)
            rank = rank_process(hello, keeper)
            welcome = await self._adopt(hello, keeper, rank)
        except SnapshotError as error:
            log.warning("a keeper (pid %d, user %d) is refused: %s", keeper.pid, user_id, error)
            writer.write(encode("refused", {"message": f"{error.message} ({error.advice})"[:4000]}))
            await writer.drain()
            return None
        link = KeeperLink(hello, welcome.uid, keeper, rank, writer)
        older = self._links.get(keeper)
        if older is not None:
            older.close()
        self._links[keeper] = link
        log.info("%r connected", link, extra={"rank": link.uid})
        try:
            await link.send(encode("welcome", {"uid": link.uid, "node": welcome.node, "endpoint": welcome.endpoint}))
        except RankGone as error:
            log.info("%s", error)  # _follow reads the end of the link and tells of it
        return link

    async def _follow(self, link: KeeperLink, incoming: AsyncIterator[Frame], pidfd: int) -> None:
        """One link's life after the welcome. Whatever ends it is told; a frame that makes no sense is raised."""
        events: asyncio.Queue[_Event | None] = asyncio.Queue()
        events.put_nowait(lambda: self._events.connected(link))
        teller = asyncio.create_task(_tell(link, events))
        self._tasks.add(teller)
        teller.add_done_callback(self._tasks.discard)
        try:
            async for frame in incoming:
                self._take(link, frame, events)
        finally:
            link.close()
            superseded = self._links.get(link.keeper) is not link
            if not superseded:
                del self._links[link.keeper]
            if not self._stopping:
                if not superseded:
                    watched = os.dup(pidfd)
                    events.put_nowait(lambda: self._part(link, watched))
                events.put_nowait(None)

    def _take(self, link: KeeperLink, frame: Frame, events: asyncio.Queue[_Event | None]) -> None:
        kind = frame.type
        if kind in RELAY_TYPES:
            link.take_relay(frame)
        elif kind in ("held", "stdio", "resumed", "gone", "ready", "active"):
            link.take_answer(frame)
        elif kind == "exited":
            status = _status(frame)
            events.put_nowait(lambda: self._exited(link, status))
        elif kind == "died":
            move, ended = str(frame.header.get("move", "")), _status(frame)
            events.put_nowait(lambda: self._events.died(link, move, ended))
        else:
            raise FrameError(f"{link!r} sent an unknown frame {kind[:20]!r}")

    async def _exited(self, link: KeeperLink, status: int) -> None:
        await self._events.exited(link, status)
        await link.send(encode("bye"))

    async def _part(self, link: KeeperLink, pidfd: int) -> None:
        """After the link: tells whether its keeper lives on, and if so goes on watching until it is back or ends."""
        try:
            ended = await _ended(pidfd, timeout_s=0.5)
            if not ended and link.keeper not in self._links:
                log.info("%r has closed its link and lives on", link, extra={"rank": link.uid})
                await self._events.closed(link, True)
            while not ended:
                if link.keeper in self._links:
                    return  # it is back; its new link is watched instead
                ended = await _ended(pidfd, timeout_s=1.0)
            log.info("%r has ended", link, extra={"rank": link.uid})
            await self._events.closed(link, False)
        finally:
            os.close(pidfd)


async def _tell(link: KeeperLink, events: asyncio.Queue[_Event | None]) -> None:
    while (event := await events.get()) is not None:
        try:
            await event()
        except SnapshotError as error:
            log.warning("about %r: %s", link, error, extra={"rank": link.uid})
        except Exception:  # one listener's defect must not silence the rest, `closed` above all
            log.exception("a listener failed on an event of %r", link, extra={"rank": link.uid})


def _status(frame: Frame) -> int:
    status = frame.header.get("status")
    if type(status) is not int or not 0 <= status <= 0xFFFF:
        raise FrameError(f"a wait status of {str(status)[:40]!r} is impossible")
    return status


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    decoder = Decoder()
    while data := await reader.read(1 << 18):
        for frame in decoder.feed(data):
            yield frame


async def _ended(pidfd: int, timeout_s: float) -> bool:
    """Whether the process of a pidfd ends within the time. A dying process closes its sockets before it is a zombie."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
