"""The keepers on this node: a unix socket that every user may connect to, and one link for each connected keeper.

Invariants: a connection is counted by its user, and refused if that user has too many, before anything is read from it
(quota.py). A malformed frame closes the link it came on and nothing else. A link may be closed and opened again (keeper
and daemon may reconnect) without effect on the rank. `closed(link, False)` is called exactly once for each keeper, after
its process has ended. The events of a link are delivered in order by a separate task, so a callback may send requests to
the keeper.

shim/README.md lists the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shim.keeper.frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, RELAY_TYPES, Decoder, Frame, FrameError, encode
from snapshotd.api.errors import NotFound, RankGone, Refused, SnapshotError
from snapshotd.inprocess.symbols import builds
from snapshotd.keepers.hello import (
    Hello,
    Peer,
    check_keeper,
    parse_hello,
    peer_of,
    protocol_problem,
    rank_process,
    user_of,
)
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.quota import Connections, Counted, Limits, Verdict
from snapshotd.keepers.turns import HELLO_S, SLICE_S, Turns
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import USERS, in_thread
from snapshotd.runtime.logs import Throttle

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
#: Pause of the listener if the daemon has no descriptors left.
_EXHAUSTED_S = 0.5
#: Connections that the kernel keeps until they are accepted, and those that are accepted before other work gets a turn.
#: A user who connects as fast as possible must not fill the former faster than it is emptied.
_BACKLOG, _AT_ONCE = 4096, 256
#: Events of one keeper that may wait for delivery. A keeper has a handful.
_MAX_EVENTS = 256
#: Log records about the keepers of one user in a minute: of refusals and broken links, and of coming and going.
_MAX_COMPLAINTS, _MAX_NOTICES = 5, 300


_SAME_PACKAGE = (
    "install the package of this node's snapshotd where `migrator run` comes from; --allow-unprotected runs it anyway"
)


@dataclass(frozen=True)
class Welcome:
    """The answer to a hello: the rank's uid, and the name and endpoint of this node."""

    uid: str
    node: str
    endpoint: str
    user_id: int | None = None  # whose rank it is, if not that of the keeper's user: root starts guest keepers
    warning: str = ""  # printed by a new keeper

    def fields(self, uid: str) -> dict[str, str]:
        return {"uid": uid, "node": self.node, "endpoint": self.endpoint, "warning": self.warning}


def version_problem(hello: Hello) -> str:
    """Why this daemon could not move a new rank with such a keeper and library, or "". A rank that runs keeps what it has."""
    if hello.uid:
        return ""
    if problem := protocol_problem(hello.protocol):
        return problem
    if hello.library is None:
        return ""
    return builds.problem(bytes.fromhex(hello.library.build), hello.library.abi)


class NotWanted(NotFound):
    """A guest keeper whose move has no copy here and never will: it may end. Others that are refused try again."""


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
    failed:    (link, wait status): the rank has failed; the keeper holds that back for a while, for a rollback of its job.
    """

    connected: Callable[[KeeperLink], Awaitable[None]]
    closed: Callable[[KeeperLink, bool], Awaitable[None]]
    exited: Callable[[KeeperLink, int], Awaitable[None]]
    died: Callable[[KeeperLink, str, int], Awaitable[None]]
    failed: Callable[[KeeperLink, int], Awaitable[None]]


_Event = Callable[[], Awaitable[None]]


class KeeperLinks:
    """The server on keeper.sock, and the keepers that are connected to it."""

    def __init__(self, path: Path, adopt: Adopt, events: KeeperEvents, limits: Limits | None = None) -> None:
        self.path = path
        self._adopt = adopt
        self._events = events
        self._connections = Connections(limits or Limits())
        self._turns = Turns()
        self._complaints, self._notices = Throttle(log, _MAX_COMPLAINTS), Throttle(log, _MAX_NOTICES)
        self._listener: socket.socket | None = None
        self._pausing: asyncio.TimerHandle | None = None
        self._links: dict[Process, KeeperLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Starts to listen. The socket appears under its name only when it is bound and has mode 0666."""
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(fresh))
        listener.listen(_BACKLOG)
        fresh.chmod(0o666)
        fresh.rename(self.path)
        self._listener = listener
        self._listen(listener)

    async def stop(self) -> None:
        """Closes all links without further events. The keepers keep running and connect to the next daemon."""
        self._stopping = True
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            if self._pausing is not None:
                self._pausing.cancel()
            listener.close()
            self.path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def all(self) -> list[KeeperLink]:
        return list(self._links.values())

    def find(self, uid: str, role: str) -> KeeperLink | None:
        """The connected keeper of a rank. A rank that returned to its home node has a home and a guest keeper here."""
        return next((link for link in self._links.values() if (link.uid, link.role) == (uid, role)), None)

    def _accept_some(self, listener: socket.socket) -> None:
        """Accepts what waits, up to a limit. Not asyncio's server: that one reads from a connection at once."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:  # no descriptors or no memory
                self._complaints.warning(0, "cannot accept keepers: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._pausing = loop.call_later(_EXHAUSTED_S, self._listen, listener)
                return
            connection.setblocking(False)
            self._accepted(connection)

    def _listen(self, listener: socket.socket) -> None:
        self._pausing = None
        asyncio.get_running_loop().add_reader(listener, self._accept_some, listener)

    def _accepted(self, connection: socket.socket) -> None:
        user_id = user_of(connection)
        verdict, reason = self._connections.verdict(user_id)
        if verdict is not Verdict.ACCEPT:
            self._complaints.warning(user_id, "refused a connection of user %d: %s", user_id, reason)
            if verdict is Verdict.REFUSE:
                with contextlib.suppress(OSError):
                    connection.send(encode("refused", {"message": f"{reason} (end some of its ranks)"}))
            connection.close()
            return
        counted = self._connections.opened(user_id)
        task = asyncio.create_task(self._serve_counted(connection, counted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def ended(_: asyncio.Task[None]) -> None:  # not in the task, which may be cancelled before its first step
            counted.close()
            if not counted.is_served:
                connection.close()

        task.add_done_callback(ended)

    async def _serve_counted(self, connection: socket.socket, counted: Counted) -> None:
        try:
            peer = peer_of(connection)
        except RankGone as error:
            self._complaints.warning(counted.user_id, "closed the connection of a keeper: %s", error)
            return
        writer: asyncio.StreamWriter | None = None
        try:
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
            counted.is_served = True  # the transport closes the socket
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await self._serve(reader, writer, peer, counted)
        except (FrameError, SnapshotError) as error:
            self._complaints.warning(peer.user_id, "closed the connection of a keeper: %s", error)
        except OSError as error:  # TimeoutError too
            reason = str(error) or type(error).__name__
            self._complaints.warning(peer.user_id, "lost the connection of a keeper: %s", reason)
        finally:
            os.close(peer.pidfd)
            if writer is not None:
                writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer, counted: Counted
    ) -> None:
        decoder = Decoder(MAX_HELLO_BYTES)
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await _first(reader, decoder)
        await self._turns.used(peer.user_id, HELLO_S)
        counted.spoke()
        decoder.max_frame_bytes = MAX_FRAME_BYTES
        if first is None or not peer.process.alive():
            return
        link = await self._welcome(first, peer, writer)
        if link is not None:
            await self._read(link, reader, decoder, peer.pidfd)

    async def _welcome(self, first: Frame, peer: Peer, writer: asyncio.StreamWriter) -> KeeperLink | None:
        keeper = peer.process
        try:
            hello = parse_hello(first, peer.user_id)
            if peer.user_id == 0:  # such as a guest keeper, for which a move waits
                welcome, rank = await self._register(hello, peer)
            else:
                async with USERS.turn(peer.user_id):
                    welcome, rank = await self._register(hello, peer)
        except SnapshotError as error:
            self._complaints.warning(
                peer.user_id, "refused a keeper (pid %d, user %d): %s", keeper.pid, peer.user_id, error
            )
            fields = {"message": f"{error.message} ({error.advice})"[:4000], "final": isinstance(error, NotWanted)}
            writer.write(encode("refused", fields))
            await writer.drain()
            return None
        link = KeeperLink(hello, welcome.uid, keeper, rank, writer)
        link.user_id = peer.user_id if welcome.user_id is None else welcome.user_id
        older = self._links.get(keeper)
        if older is not None:
            older.close()
        self._links[keeper] = link
        self._notices.info(peer.user_id, "%r connected", link, extra={"rank": link.uid})
        try:
            await link.send(encode("welcome", welcome.fields(link.uid)))
        except RankGone as error:
            log.info("%s", error)  # _read then reads the end of the link and reports it
        return link

    async def _register(self, hello: Hello, peer: Peer) -> tuple[Welcome, Process | None]:
        problem = await in_thread(version_problem, hello)
        if problem and not hello.allow_unprotected:
            raise Refused(f"it could not be moved, because {problem}", remedy=_SAME_PACKAGE)
        keeper_status = await in_thread(check_keeper, peer)
        rank = await in_thread(rank_process, hello, peer.process, keeper_status)
        welcome = await self._adopt(hello, peer.process, rank)
        return replace(welcome, warning=f"this rank cannot be moved, because {problem}" if problem else ""), rank

    async def _read(self, link: KeeperLink, reader: asyncio.StreamReader, decoder: Decoder, pidfd: int) -> None:
        """Reads a link after the welcome. Its end becomes an event. Raises FrameError for a malformed frame."""
        events: asyncio.Queue[_Event | None] = asyncio.Queue()  # bounded by _take; the end of the link always fits
        events.put_nowait(lambda: self._events.connected(link))
        events_task = asyncio.create_task(_deliver(link, events))
        self._tasks.add(events_task)
        events_task.add_done_callback(self._tasks.discard)
        try:
            data = b""  # the decoder may have frames that came with the hello
            while True:
                began_s = time.thread_time()
                for frame in decoder.feed(data):
                    self._take(link, frame, events)
                    if (used_s := time.thread_time() - began_s) > SLICE_S:
                        await self._turns.used(link.user_id, used_s)
                        began_s = time.thread_time()
                await self._turns.used(link.user_id, time.thread_time() - began_s)
                if not (data := await reader.read(1 << 18)):
                    return
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
        if events.qsize() > _MAX_EVENTS:
            raise FrameError(f"{link!r} sends events faster than they can be handled")
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
        elif kind == "failed":
            failure = _status(frame)
            events.put_nowait(lambda: self._events.failed(link, failure))
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
                self._notices.info(
                    link.info.user_id, "%r has disconnected; its process is alive", link, extra={"rank": link.uid}
                )
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


async def _first(reader: asyncio.StreamReader, decoder: Decoder) -> Frame | None:
    """What follows the first frame stays in the decoder."""
    while data := await reader.read(1 << 16):
        for frame in decoder.feed(data):
            return frame
    return None


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
