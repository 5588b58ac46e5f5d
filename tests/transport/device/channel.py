"""Both sides of a device-memory channel on loopback, with real processes, and a proxy that cuts and changes what passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from migrator import pki
from snapshotd.api.credentials import Credentials
from snapshotd.transport import handshake
from snapshotd.transport.device import ring
from snapshotd.transport.device.child import Child
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.device.records import HEADER_BYTES, RECORD_BYTES
from snapshotd.transport.device.ring import Ring
from snapshotd.transport.routes import Route
from snapshotd.transport.sealed import TAG_BYTES

SOURCE, TARGET = "node-1", "node-2"
MIB = 1 << 20
#: (number of the connection, bytes passed since TLS was left, these bytes) -> bytes to pass on; None: cut the connection here
Alter = Callable[[int, int, bytes], bytes | None]


def new_ring(path: Path, ring_bytes: int) -> Ring:
    ring.create(str(path), ring_bytes)
    return Ring(str(path))


def noise(length: int) -> bytes:
    return os.urandom(length)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the growth of a file is not an event
            await asyncio.sleep(0.01)


def children() -> list[int]:
    """Child processes of stripes that this process has started."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and b"snapshotd.transport.device" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


@contextmanager
def given_to(child: Child) -> Iterator[socket.socket]:
    """The peer of a plain connection that the child receives."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child.say({}, [theirs.fileno()])
        yield ours


def credentials_of(authority: Path, node: str) -> Credentials:
    identity = pki.issue_node(authority, node)
    return Credentials(identity.ca, identity.cert, identity.key)


class Nodes:
    """Source and target, with a folder each."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.here, self.there = folder / "source", folder / "target"
        self.here.mkdir()
        self.there.mkdir()
        self.encrypted = encrypted
        pki.init(folder / "ca")
        self.source, self.target = (credentials_of(folder / "ca", node) for node in (SOURCE, TARGET))

    def context(self) -> ssl.SSLContext:
        """Of the source."""
        return handshake.tls_context(self.source, server_side=False)

    def travels(self, *lengths: int) -> int:
        """The bytes that messages of these lengths take on the connection."""
        return sum(lengths) + (TAG_BYTES * len(lengths) if self.encrypted else 0)

    def record(self, number: int) -> int:
        """The offset of a record in what the source sends, if all records before it were full ones with payload."""
        return number * self.travels(HEADER_BYTES, RECORD_BYTES)

    def fill(self, contents: Mapping[str, bytes]) -> dict[str, int]:
        for name, content in contents.items():
            (self.here / name).write_bytes(content)
        return {name: len(content) for name, content in contents.items()}

    def arrived(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: (self.there / name).read_bytes() for name in names}

    @asynccontextmanager
    async def incoming(
        self,
        names: Sequence[str],
        *,
        expected_bytes: int = 0,
        data_addresses: Sequence[str] = (),
        ring_bytes: int = 0,
    ) -> AsyncIterator[Incoming]:
        opened = await Incoming.open(
            self.there,
            names,
            ["127.0.0.1"],
            SOURCE,
            self.target,
            encrypted=self.encrypted,
            expected_bytes=expected_bytes,
            data_addresses=data_addresses,
            ring_bytes=ring_bytes,
        )
        try:
            yield opened
        finally:
            await opened.close()

    @asynccontextmanager
    async def outgoing(
        self, port: int, key: bytes, names: Sequence[str], routes: Sequence[Route] = (), *, rings: bool = False
    ) -> AsyncIterator[Outgoing]:
        routes = routes or [Route("127.0.0.1", port)]
        opened = await Outgoing.open(
            routes, key, TARGET, self.source, self.here, names, encrypted=self.encrypted, rings=rings
        )
        try:
            yield opened
        finally:
            await opened.close()

    @asynccontextmanager
    async def both(
        self,
        names: Sequence[str],
        alter: Alter | None = None,
        alter_back: Alter | None = None,
        *,
        ring_bytes: int = 0,
    ) -> AsyncIterator[tuple[Incoming, Outgoing, Proxy]]:
        """`ring_bytes`: of the target's rings; the source has some too."""
        async with (
            self.incoming(names, ring_bytes=ring_bytes) as incoming,
            Proxy(incoming.port, alter, alter_back) as proxy,
            self.outgoing(proxy.port, incoming.key, names, rings=ring_bytes > 0) as outgoing,
        ):
            yield incoming, outgoing, proxy


class Proxy:
    """A TCP proxy in front of a port. It alters nothing of TLS, if that is `spared`."""

    def __init__(
        self, port: int, alter: Alter | None = None, alter_back: Alter | None = None, *, spared: bool = True
    ) -> None:
        self._to, self._alter, self._alter_back, self._spared = port, alter, alter_back, spared
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        #: While set, nothing that the target sends is passed on.
        self.muted = False
        #: While set, neither side learns that the other has closed its connection.
        self.silent = False

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cuts all connections at once."""
        for writer in self._writers:
            with contextlib.suppress(AttributeError):  # asyncio's, if the connection has ended by itself meanwhile
                writer.transport.abort()
        self._writers.clear()

    def cut_source(self) -> None:
        """Cuts the source's side of every connection. The target does not notice."""
        self.silent = True
        for writer in self._writers[::2]:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        try:
            beyond_reader, beyond_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except ConnectionError:  # the target has stopped listening
            writer.transport.abort()
            return
        self._writers += [writer, beyond_writer]
        for way in ((reader, beyond_writer, self._alter), (beyond_reader, writer, self._alter_back)):
            task = asyncio.create_task(self._pass_on(number, *way, back=way[1] is writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        alter: Alter | None,
        *,
        back: bool,
    ) -> None:
        passed = 0
        tls = Tls() if self._spared else None
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(64 << 10):
                shaking, part = tls.split(part) if tls is not None else (b"", part)
                goes_on = alter(number, passed, part) if alter is not None and part else part
                if goes_on is None:
                    self.cut()
                    return
                passed += len(part)
                if not (back and self.muted):
                    writer.write(shaking + goes_on)
                    await writer.drain()
        if not self.silent:
            writer.close()


class Tls:
    """One direction of a connection that begins with TLS 1.3 and leaves it: an alert, the only record of this length."""

    _HEADER = struct.Struct(">BHH")
    _ALERT = (23, 19)  # application data; two bytes, the type of the content and a tag

    def __init__(self) -> None:
        self._unread = b""
        self._left = False

    def split(self, part: bytes) -> tuple[bytes, bytes]:
        """(whole records of TLS, what follows TLS)."""
        if self._left:
            return b"", part
        self._unread += part
        end = 0
        while not self._left and len(self._unread) >= end + self._HEADER.size:
            kind, _, length = self._HEADER.unpack_from(self._unread, end)
            if len(self._unread) < end + self._HEADER.size + length:
                break
            end += self._HEADER.size + length
            self._left = (kind, length) == self._ALERT
        records, self._unread = self._unread[:end], self._unread[end:]
        if not self._left:
            return records, b""
        rest, self._unread = self._unread, b""
        return records, rest


def flip(at: int) -> Alter:
    """Changes the byte at `at` of the first connection."""
    return lambda number, passed, part: flipped(part, at - passed) if number == 0 else part


def flipped(part: bytes, at: int) -> bytes:
    return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :] if 0 <= at < len(part) else part
