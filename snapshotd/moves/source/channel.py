"""The way to the target: the bulk lane beside gRPC, or gRPC itself where the network lets no other port through."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Internal, SnapshotError, Unreachable, Where
from snapshotd.config import split_address
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.transport.image.bulk_sender import open_streams
from snapshotd.transport.image.grpc_channel import PushCall, push_channels
from snapshotd.transport.image.stream import Stream

log = logging.getLogger(__name__)

_OPEN_S = 10.0


@asynccontextmanager
async def streams_to_target(node: Node, begin: Begin) -> AsyncIterator[Sequence[Stream]]:
    """Streams for the images of a frozen rank; the sender that gets them ends them."""
    config = node.config
    beside = await _beside_grpc(node, begin)
    if beside:
        yield beside
        return
    channels = push_channels(begin.target_endpoint, config.credentials, begin.target_node, config.streams)
    try:
        yield [PushCall(channel, begin.move) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


async def _beside_grpc(node: Node, begin: Begin) -> Sequence[Stream]:
    """None at all where the lane cannot be opened or reached. What the target has against the move itself is raised."""
    config = node.config
    try:
        async with node.client(begin.target_node, begin.target_endpoint) as client:
            lane = await client.target.OpenImageChannel(pb.OpenImageChannelRequest(move=begin.move), timeout_s=_OPEN_S)
    except Internal as error:  # it has no port for it, or is of a version that knows no such lane
        log.warning("gRPC carries the images: %s has no bulk lane: %s", begin.target_node, error.message)
        return []
    except SnapshotError as error:
        error.where = Where.SOURCE_FROZEN
        raise
    host, _ = split_address(begin.target_endpoint)
    try:
        return await open_streams(host, lane.port, lane.key, config.credentials, begin.target_node, config.streams)
    except Unreachable as error:
        log.warning("gRPC carries the images: the bulk lane cannot be reached: %s", error.message)
        return []
