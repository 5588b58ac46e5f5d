"""A running target that tests use by streams or message by message. One class for gRPC and one for bulk connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from migrator import pki
from snapshotd.api.calls import Channel
from snapshotd.api.channel import open_channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import SnapshotError
from snapshotd.api.methods import PUSH
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake
from snapshotd.transport.image import bulk_sender
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.frame import Answer, Kind, parse_answer
from snapshotd.transport.image.grpc_channel import MOVE_KEY, PushCall
from snapshotd.transport.image.messages import next_bytes, send_end, send_message
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.routes import Route
from snapshotd.transport.sealed import Connection, SealedConnection

MOVE = "m-0123456789ab"
NODE = "node-2"
Alter = Callable[[bytes], bytes]


def issue(folder: Path, node: str) -> Credentials:
    identity = pki.issue_node(folder, node)
    return Credentials(identity.ca, identity.cert, identity.key)


class Target(ABC):
    """A running target; `authorised` lists the moves that were admitted, once per stream."""

    def __init__(self, store: ImageStore, credentials: Credentials, stream_count: int) -> None:
        self.store, self.credentials, self.stream_count = store, credentials, stream_count
        self.authorised: list[str] = []

    @abstractmethod
    async def streams(self) -> Sequence[Stream]:
        """New streams, as many as the target was created for."""

    @abstractmethod
    async def answers(self, *messages: bytes) -> list[Answer]:
        """Sends the messages unchanged and returns every answer until the target ends the stream."""

    async def stream(self) -> Stream:
        first, *others = await self.streams()
        for other in others:
            await hang_up(other)
        return first


async def hang_up(stream: Stream) -> None:
    stream.cancel()
    await stream.ended()


Serve = Callable[..., AbstractAsyncContextManager[Target]]


# ---------------------------------------------------------------- over gRPC


class GrpcTarget(Target):
    """Its streams are those of a daemon: through the link to a network process, which has the connections."""

    channels: list[Channel]
    endpoint: str

    async def streams(self) -> Sequence[Stream]:
        return [PushCall(channel, MOVE) for channel in self.channels]

    async def answers(self, *messages: bytes) -> list[Answer]:
        return await self.answers_for(((MOVE_KEY, MOVE),), *messages)

    async def answers_for(self, metadata: Sequence[tuple[str, str]], *messages: bytes) -> list[Answer]:
        async with open_channel(self.endpoint, self.credentials, NODE) as channel:
            call: Any = channel.stream_stream(PUSH)(metadata=tuple(metadata))
            for message in messages:
                await call.write(message)
            await call.done_writing()
            taken = []
            while (message := await call.read()) is not grpc.aio.EOF:
                taken.append(parse_answer(message))
            assert await call.code() is grpc.StatusCode.OK
            return taken


# ---------------------------------------------------------------- bulk connections


class BulkTarget(Target):
    receivers: BulkReceivers
    port: int
    key: bytes

    async def streams(self) -> Sequence[Stream]:
        routes = [Route("127.0.0.1", self.port)]
        return await bulk_sender.open_streams(routes, self.key, self.credentials, NODE, self.stream_count)

    async def answers(self, *messages: bytes) -> list[Answer]:
        return await in_thread(self._answers, messages)

    def connect(self, key: bytes | None = None, credentials: Credentials | None = None) -> Connection:
        ours = credentials or self.credentials
        context = handshake.tls_context(ours, server_side=False)
        key = self.key if key is None else key
        return SealedConnection(*handshake.connect(Route("127.0.0.1", self.port), key, context, ours, NODE))

    def _answers(self, messages: Sequence[bytes]) -> list[Answer]:
        try:
            connection = self.connect()
        except SnapshotError as error:  # refused before the first chunk
            return [Answer(Kind.ERROR, text=error.to_wire())]
        with connection:
            for message in messages:
                send_message(connection, message)
            send_end(connection)
            return taken_from(connection)


def taken_from(connection: Connection) -> list[Answer]:
    taken = []
    while (length := next_bytes(connection)) is not None:
        taken.append(parse_answer(connection.read(length)))
    return taken
