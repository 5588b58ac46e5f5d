"""Both ends of stripes on loopback, real processes, and somebody on the way who cuts and changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from snapshotd.transport.device.connection import TAG_BYTES
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.device.records import HEADER_BYTES, RECORD_BYTES

SOURCE, TARGET = "node-1", "node-2"
MIB = 1 << 20
#: What the source says before its first record, and the target before its first reply: key.py.
GREETING_BYTES = 40 + 32
ANSWER_BYTES = 32 + 32

#: (number of the connection, bytes before these, these) -> what goes on, None: cut here
Meddle = Callable[[int, int, bytes], bytes | None]


def noise(length: int) -> bytes:
    return os.urandom(length)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a file's growth is no event
            await asyncio.sleep(0.01)


def children() -> list[int]:
    """Processes of stripes that this one has started."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and b"snapshotd.transport.device" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


class Ends:
    """A folder each."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.here, self.there = folder / "source", folder / "target"
        self.here.mkdir()
        self.there.mkdir()
        self.encrypted = encrypted

    def travels(self, *lengths: int) -> int:
        """The bytes that messages of these lengths take on the way."""
        return sum(lengths) + (TAG_BYTES * len(lengths) if self.encrypted else 0)

    def record(self, number: int) -> int:
        """Where in what the source says a record begins, when those before it were whole and had to travel."""
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
        self, names: Sequence[str], meddle: Meddle | None = None, meddle_back: Meddle | None = None
    ) -> AsyncIterator[tuple[Incoming, Outgoing, Meddler]]:
        async with (
            self.incoming(names) as incoming,
            Meddler(incoming.port, meddle, meddle_back) as meddler,
            self.outgoing(meddler.port, incoming.key, names) as outgoing,
        ):
            yield incoming, outgoing, meddler


class Meddler:
    """A proxy in front of a port."""

    def __init__(self, port: int, meddle: Meddle | None = None, meddle_back: Meddle | None = None) -> None:
        self._to, self._meddle, self._meddle_back = port, meddle, meddle_back
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        #: Nothing of what the target says comes through while this is set.
        self.deaf = False
        #: Neither end is told that the other one has gone.
        self.silent = False

    async def __aenter__(self) -> Meddler:
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
        """All connections, at once."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def cut_source(self) -> None:
        """The source's side of every connection; the target hears nothing of it."""
        self.silent = True
        for writer in self._writers[::2]:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        try:
            beyond_reader, beyond_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except ConnectionError:  # the target has given up
            writer.transport.abort()
            return
        self._writers += [writer, beyond_writer]
        for way in ((reader, beyond_writer, self._meddle), (beyond_reader, writer, self._meddle_back)):
            task = asyncio.create_task(self._pass_on(number, *way, back=way[1] is writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        meddle: Meddle | None,
        *,
        back: bool,
    ) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(64 << 10):
                goes_on = meddle(number, passed, part) if meddle is not None else part
                if goes_on is None:
                    self.cut()
                    return
                passed += len(part)
                if not (back and self.deaf):
                    writer.write(goes_on)
                    await writer.drain()
        if not self.silent:
            writer.close()


def flip(at: int) -> Meddle:
    """Changes the byte at `at` of the first connection."""
    return lambda number, passed, part: flipped(part, at - passed) if number == 0 else part


def flipped(part: bytes, at: int) -> bytes:
    return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :] if 0 <= at < len(part) else part
