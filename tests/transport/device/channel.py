"""Both sides of a device-memory channel on loopback, with real processes, and a proxy that cuts and changes what passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.device.records import HEADER_BYTES, RECORD_BYTES
from snapshotd.transport.sealed import TAG_BYTES

SOURCE, TARGET = "node-1", "node-2"
MIB = 1 << 20
#: What the source sends before its first record, and the target before its first reply: authentication.py.
GREETING_BYTES = 40 + 32
ANSWER_BYTES = 32 + 32

#: (number of the connection, bytes passed before, these bytes) -> bytes to pass on; None: cut the connection here
Alter = Callable[[int, int, bytes], bytes | None]


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


class Nodes:
    """Source and target, with a folder each."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.here, self.there = folder / "source", folder / "target"
        self.here.mkdir()
        self.there.mkdir()
        self.encrypted = encrypted

    def travels(self, *lengths: int) -> int:
        """The bytes that messages of these lengths take on the connection."""
        return sum(lengths) + (TAG_BYTES * len(lengths) if self.encrypted else 0)

    def record(self, number: int) -> int:
        """The offset of a record in what the source sends, if all records before it were full ones with payload."""
        return GREETING_BYTES + number * self.travels(HEADER_BYTES, RECORD_BYTES)

    def fill(self, contents: Mapping[str, bytes]) -> dict[str, int]:
        for name, content in contents.items():
            (self.here / name).write_bytes(content)
        return {name: len(content) for name, content in contents.items()}

    def arrived(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: (self.there / name).read_bytes() for name in names}

    @asynccontextmanager
    async def incoming(self, names: Sequence[str], *, expected_bytes: int = 0) -> AsyncIterator[Incoming]:
        opened = await Incoming.open(
            self.there,
            names,
            ["127.0.0.1"],
            SOURCE,
            encrypted=self.encrypted,
            expected_bytes=expected_bytes,
        )
        try:
            yield opened
        finally:
            await opened.close()

    @asynccontextmanager
    async def outgoing(self, port: int, key: bytes, names: Sequence[str]) -> AsyncIterator[Outgoing]:
        opened = await Outgoing.open("127.0.0.1", port, key, TARGET, self.here, names, encrypted=self.encrypted)
        try:
            yield opened
        finally:
            await opened.close()

    @asynccontextmanager
    async def both(
        self, names: Sequence[str], alter: Alter | None = None, alter_back: Alter | None = None
    ) -> AsyncIterator[tuple[Incoming, Outgoing, Proxy]]:
        async with (
            self.incoming(names) as incoming,
            Proxy(incoming.port, alter, alter_back) as proxy,
            self.outgoing(proxy.port, incoming.key, names) as outgoing,
        ):
            yield incoming, outgoing, proxy


class Proxy:
    """A TCP proxy in front of a port."""

    def __init__(self, port: int, alter: Alter | None = None, alter_back: Alter | None = None) -> None:
        self._to, self._alter, self._alter_back = port, alter, alter_back
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
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(64 << 10):
                goes_on = alter(number, passed, part) if alter is not None else part
                if goes_on is None:
                    self.cut()
                    return
                passed += len(part)
                if not (back and self.muted):
                    writer.write(goes_on)
                    await writer.drain()
        if not self.silent:
            writer.close()


def flip(at: int) -> Alter:
    """Changes the byte at `at` of the first connection."""
    return lambda number, passed, part: flipped(part, at - passed) if number == 0 else part


def flipped(part: bytes, at: int) -> bytes:
    return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :] if 0 <= at < len(part) else part
