"""Calls of the daemon to other daemons: the real gRPC connections, and the replies decoded and written anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from snapshotd.api import access
from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.channel import GrpcChannel, GrpcStream, connect
from snapshotd.api.errors import Damaged
from snapshotd.api.methods import Method, methods, rewritten
from snapshotd.network.frames import Close, Dial
from snapshotd.network.link import Call

Contents = tuple[bytes, bytes, bytes]


class _Connection:
    """One gRPC connection, and how many calls use it. A retired one is closed with its last call."""

    def __init__(self, files: Contents, channel: GrpcChannel) -> None:
        self.files, self.channel = files, channel
        self.calls, self.retired = 0, False


class Outbound:
    """All connections to other daemons. `files` returns the latest contents of (ca, cert, key).

    A call that begins after certificates were replaced uses the new ones; calls that are open go on as they are.
    """

    def __init__(self, files: Callable[[], Contents]) -> None:
        self._files = files
        self._channels: dict[int, _Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self, call: Call) -> None:
        """Runs one call. Raises CallFailed if it ends with another status than OK."""
        dial = call.opening
        assert isinstance(dial, Dial)  # the decoder lets nothing else open a call
        connection = self._connection(dial)
        connection.calls += 1
        try:
            await self._call(call, dial, connection.channel)
        finally:
            connection.calls -= 1
            self._end_if_unused(connection)

    def _connection(self, dial: Dial) -> _Connection:
        files, found = self._files(), self._channels.get(dial.channel)
        if found is not None and found.files == files:
            return found
        if found is not None:
            found.retired = True
            self._end_if_unused(found)
        made = _Connection(files, GrpcChannel(connect(dial.endpoint, files, dial.node)))
        self._channels[dial.channel] = made
        return made

    def _end_if_unused(self, connection: _Connection) -> None:
        if connection.retired and not connection.calls:
            self._end(connection)

    async def _call(self, call: Call, dial: Dial, channel: GrpcChannel) -> None:
        method = methods().get(dial.method)
        try:
            if method is not None and not method.request_streaming and not method.reply_streaming:
                request = await call.read()
                reply = await channel.unary(dial.method, request or b"", dial.timeout_s)
                await call.write(rewritten(method.reply, reply))
            else:
                await _carry(call, channel.stream(dial.method, dial.timeout_s, dict(dial.metadata)), method)
        except DecodeError as error:
            name = dial.method.rpartition("/")[2]
            text = f"node {dial.node} at {dial.endpoint} answered {name} with something that is not an answer to it"
            raise access.failure(
                Damaged(text, remedy="run the same version of snapshotd and migrator everywhere")
            ) from error

    def close(self, frame: Close) -> None:
        connection = self._channels.pop(frame.channel, None)
        if connection is not None:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _carry(call: Call, outside: GrpcStream, method: Method | None) -> None:
    """Messages in both directions until the other daemon ends the call. Raises CallFailed."""

    async def feed() -> None:
        try:
            while (message := await call.read()) is not None:
                await outside.write(message)
            await outside.done_writing()
        except (CallEnded, CallFailed):
            return

    feeding = asyncio.create_task(feed(), name="requests")
    try:
        while (reply := await outside.read()) is not None:
            await call.write(rewritten(method.reply, reply) if method is not None else reply)
    finally:
        outside.cancel()
        feeding.cancel()
        await asyncio.wait([feeding])
