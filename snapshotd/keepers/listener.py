"""The keepers on this node: a unix socket that every user may connect to, and one link for each connected keeper.

Invariants: a malformed frame closes the link it came on and nothing else. A link may be closed and opened again (keeper
and daemon may reconnect) without effect on the rank. `closed(link, False)` is called exactly once for each keeper, after
its process has ended. The events of a link are delivered in order by a separate task, so a callback may send requests to
the keeper.

shim/README.md lists the frames.
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
from snapshotd.keepers.hello import Hello, parse_hello, peer_of, rank_process
from snapshotd.keepers.link import KeeperLink
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
MAX_LINKS = 4096


@dataclass(frozen=True)
class Welcome:
    """The answer to a hello: the rank's uid, and the name and endpoint of this node."""

    uid: str
    node: str
    endpoint: str


#: Creates the cgroup, puts the rank into it and registers it. A SnapshotError refuses the keeper.
Adopt = Callable[[Hello, Process, Process | None], Awaitable[Welcome]]


@dataclass(frozen=True)
class KeeperEvents:
    """The callbacks of the registry.

    connected: the keeper was welcomed, possibly again. The first event of a link.
    closed:    (link, keeper_alive). True: the keeper lives and will reconnect (not called if it reconnects at once). False:
               its process has ended; called exactly once, possibly after a True.
    exited:    (link, wait status): the rank has ended. Afterwards the keeper is sent `bye` and exits.
    died:      (link, move, wait status): the local process ended during a move; the keeper waits for resume or away.
    """

    connected: Callable[[KeeperLink], Awaitable[None]]
    closed: Callable[[KeeperLink, bool], Awaitable[None]]
    exited: Callable[[KeeperLink, int], Awaitable[None]]
    died: Callable[[KeeperLink, str, int], Awaitable[None]]


_Event = Callable[[], Awaitable[None]]


class KeeperLinks:
    """The server on keeper.sock, and the keepers that are connected to it."""

    def __init__(self, path: Path, adopt: Adopt, events: KeeperEvents) -> None:
        self.path = path
        self._adopt = adopt
        self._events = events
        self._server: asyncio.Server | None = None
        self._links: dict[Process, KeeperLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Starts to listen. The socket appears under its name only when it is bound and has mode 0666."""
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(fresh))
        listener.listen(1024)
        fresh.chmod(0o666)
        fresh.rename(self.path)
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def stop(self) -> None:
        """Closes all links without further events. The keepers keep running and connect to the next daemon."""
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
        """The connected keeper of a rank. A rank that returned to its home node has a home and a guest keeper here."""
        return next((link for link in self._links.values() if (link.uid, link.role) == (uid, role)), None)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A separate task: asyncio's server logs an error if stop() cancels a task that the server created.
        task = asyncio.create_task(self._accept(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._tasks) > MAX_LINKS:
                raise Usage(f"more than {MAX_LINKS} keepers are connected", remedy="run fewer ranks on this node")
            await self._serve(reader, writer)
        except (FrameError, SnapshotError) as error:
            log.warning("closed the connection of a keeper: %s", error)
        except OSError as error:  # TimeoutError too
            log.info("lost the connection of a keeper: %s", str(error) or type(error).__name__)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming = _frames(reader)
        keeper, user_id = peer_of(writer.get_extra_info("socket"))
        pidfd = os.pidfd_open(keeper.pid)  # opened before alive() below, so it cannot refer to another process
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(incoming, None)
            if first is None or not keeper.alive():
                return
            link = await self._welcome(first, keeper, user_id, writer)
            if link is not None:
                await self._read(link, incoming, pidfd)
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
            log.warning("refused a keeper (pid %d, user %d): %s", keeper.pid, user_id, error)
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
            log.info("%s", error)  # _read then reads the end of the link and reports it
        return link

    async def _read(self, link: KeeperLink, incoming: AsyncIterator[Frame], pidfd: int) -> None:
        """Reads a link after the welcome. Its end becomes an event. Raises FrameError for a malformed frame."""
        events: asyncio.Queue[_Event | None] = asyncio.Queue()
        events.put_nowait(lambda: self._events.connected(link))
        events_task = asyncio.create_task(_deliver(link, events))
        self._tasks.add(events_task)
        events_task.add_done_callback(self._tasks.discard)
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
                    events.put_nowait(lambda: self._after_close(link, watched))
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

    async def _after_close(self, link: KeeperLink, pidfd: int) -> None:
        """Reports whether the keeper is alive. If it is, watches it until it reconnects or ends."""
        try:
            ended = await _ended(pidfd, timeout_s=0.5)
            if not ended and link.keeper not in self._links:
                log.info("%r has disconnected; its process is alive", link, extra={"rank": link.uid})
                await self._events.closed(link, True)
            while not ended:
                if link.keeper in self._links:
                    return  # it has reconnected; its new link is watched instead
                ended = await _ended(pidfd, timeout_s=1.0)
            log.info("%r has ended", link, extra={"rank": link.uid})
            await self._events.closed(link, False)
        finally:
            os.close(pidfd)


async def _deliver(link: KeeperLink, events: asyncio.Queue[_Event | None]) -> None:
    while (event := await events.get()) is not None:
        try:
            await event()
        except SnapshotError as error:
            log.warning("%r: %s", link, error, extra={"rank": link.uid})
        except Exception:  # a defect in one callback must not suppress the others, above all `closed`
            log.exception("a callback failed for an event of %r", link, extra={"rank": link.uid})


def _status(frame: Frame) -> int:
    status = frame.header.get("status")
    if type(status) is not int or not 0 <= status <= 0xFFFF:
        raise FrameError(f"{str(status)[:40]!r} is not a wait status")
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
