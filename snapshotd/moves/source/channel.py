"""Opens the image channel to the target: a bulk connection beside gRPC, or gRPC itself if no other port is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Internal, SnapshotError, Unreachable, Where
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.runtime.spans import span
from snapshotd.transport.image.bulk_sender import open_streams
from snapshotd.transport.image.grpc_channel import PushCall
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.routes import routes_to

log = logging.getLogger(__name__)

_OPEN_S = 10.0


#: The task that opens the channel, and returns its streams.
Opening = asyncio.Task[Sequence[Stream]]


@asynccontextmanager
async def opened_beside(streams: AbstractAsyncContextManager[Sequence[Stream]]) -> AsyncIterator[Opening]:
    """Opens the channel while the caller does something else, and ends its streams if the caller does not come to use them.
    Ending them twice is harmless."""
    async with AsyncExitStack() as channel:
        opening = asyncio.create_task(channel.enter_async_context(streams))
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                for stream in opening.result():
                    stream.cancel()
                await asyncio.gather(*(stream.ended() for stream in opening.result()), return_exceptions=True)


@asynccontextmanager
async def streams_to_target(node: Node, begin: Begin, *, go_last: bool = False) -> AsyncIterator[Sequence[Stream]]:
    """Streams for the images of a rank; the sender closes them. `go_last`: the rank runs, and its own traffic goes first."""
    config = node.config
    with span("open channel"):
        beside = await _beside_grpc(node, begin, go_last=go_last)
    if beside:
        yield beside
        return
    channels = [node.connect(begin.target_node, begin.target_endpoint) for _ in range(config.streams)]
    try:
        yield [PushCall(channel, begin.move) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


async def _beside_grpc(node: Node, begin: Begin, *, go_last: bool) -> Sequence[Stream]:
    """Streams of the bulk connection; none if it cannot be opened or reached. Raises errors that concern the move itself."""
    config = node.config
    try:
        async with node.client(begin.target_node, begin.target_endpoint) as client:
            channel = await client.target.OpenImageChannel(
                pb.OpenImageChannelRequest(move=begin.move, sealed=True), timeout_s=_OPEN_S
            )
        if not channel.sealed:
            raise Internal("its version of snapshotd is older, and knows others")
        routes = routes_to(begin.target_endpoint, channel.port, channel.endpoints, config.data_addresses)
    except Internal as error:  # the target has no port for it, or its version does not support it
        log.warning("gRPC carries the images: %s has no bulk connection: %s", begin.target_node, error.message)
        return []
    except SnapshotError as error:
        error.where = Where.SOURCE_FROZEN
        raise
    try:
        return await open_streams(
            routes, channel.key, config.credentials, begin.target_node, config.streams, go_last=go_last
        )
    except Unreachable as error:
        log.warning("gRPC carries the images: the bulk connection cannot be established: %s", error.message)
        return []
    except SnapshotError as error:
        error.where = Where.SOURCE_FROZEN
        raise
