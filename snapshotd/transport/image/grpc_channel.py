"""The image channel over gRPC, `/snapshotd.v1.Target/Push`: raw bytes both ways, without protobuf. It works wherever gRPC
does. Bulk connections (bulk_sender.py) are faster, where the network allows a second port.

Invariant: every chunk is answered once, in order: OK after it is verified and stored, BAD if it must be sent again. A stream
that ends early ends with one ERROR answer that carries an error of the taxonomy, never a traceback. At most WINDOW + 1
chunks of a stream are in this daemon's memory: HTTP/2 flow control holds the sender back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from snapshotd.api.channel import Credentials, open_channel
from snapshotd.api.client import translate
from snapshotd.api.errors import Busy, Damaged, Denied, SnapshotError, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.frame import Answer, Frame, Kind, parse_answer, parse_header
from snapshotd.transport.image.malloc_tuning import freed_blocks_kept
from snapshotd.transport.image.store import MOVE_NAME, ImageStore

log = logging.getLogger(__name__)

SERVICE = "snapshotd.v1.Target"
METHOD = "Push"
MOVE_KEY = "move"  # the metadata that names the move

#: Chunks of one stream in transit at a time: one is written while the next one arrives.
WINDOW = 2
MAX_STREAMS_PER_MOVE = 16
HANG_UP_S = 10.0  # how long a sender may take to close a stream that has failed

Context = grpc.aio.ServicerContext[Any, Any]
#: Raises Denied or another error if this caller may not send images of this move.
Authorise = Callable[[Context, str], Awaitable[None]]


# ---------------------------------------------------------------- the target's side


def push_handler(store: ImageStore, authorise: Authorise) -> grpc.GenericRpcHandler:
    """The handler with which a gRPC server receives images into `store`."""
    streams: Counter[str] = Counter()

    async def push(_requests: object, context: Context) -> None:
        move = ""
        try:
            move = _move_of(context)
            await authorise(context, move)
            if streams[move] >= MAX_STREAMS_PER_MOVE:
                raise Busy(f"{move} already has {streams[move]} streams")
            streams[move] += 1
            try:
                with freed_blocks_kept():
                    await _receive(store, move, context)
            finally:
                streams[move] -= 1
                if not streams[move]:
                    del streams[move]
        except SnapshotError as error:
            log.warning("images of %s: %s: %s", move or "an unnamed move", error.code, error.message)
            await context.write(Answer(Kind.ERROR, text=error.to_wire()).message())
            await _wait_until_sender_closes(context)

    behaviour: Any = push  # the type stubs know only blocking servicers
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(behaviour)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})


def _move_of(context: Context) -> str:
    named = [value for key, value in context.invocation_metadata() or () if key == MOVE_KEY]
    if len(named) != 1 or not isinstance(named[0], str) or not MOVE_NAME.fullmatch(named[0]):
        raise Denied(f"a stream of images must name its move, not {named!r}")
    return named[0]


async def _wait_until_sender_closes(context: Context) -> None:
    """A sender that is writing when the stream ends gets gRPC's own failure and never the ERROR: it must end first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            while await context.read() is not grpc.aio.EOF:
                pass


async def _receive(store: ImageStore, move: str, context: Context) -> None:
    """Reads chunks while earlier ones are stored and answered. A failure of either ends both."""
    arrived: asyncio.Queue[Frame | SnapshotError | None] = asyncio.Queue(WINDOW - 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_read_chunks(context, arrived))
            tasks.create_task(_store_chunks(store, move, context, arrived))
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def _read_chunks(context: Context, arrived: asyncio.Queue[Frame | SnapshotError | None]) -> None:
    """An invalid chunk is queued as its error, so that earlier chunks are answered first."""
    try:
        while (header := await context.read()) is not grpc.aio.EOF:
            frame = parse_header(header)
            if frame.payload_bytes:
                frame.payload = await _read_payload(context, frame)
            await arrived.put(frame)
    except SnapshotError as error:
        await arrived.put(error)
    else:
        await arrived.put(None)


async def _read_payload(context: Context, frame: Frame) -> bytes:
    payload = await context.read()
    if payload is grpc.aio.EOF:
        raise Damaged(f"{frame.name}: the stream ended before the payload of the chunk at {frame.offset}")
    if len(payload) != frame.payload_bytes:
        got = f"{len(payload)} bytes instead of {frame.payload_bytes}"
        raise Damaged(f"{frame.name}: the chunk at {frame.offset} has {got}")
    return bytes(payload)


async def _store_chunks(
    store: ImageStore, move: str, context: Context, arrived: asyncio.Queue[Frame | SnapshotError | None]
) -> None:
    while (frame := await arrived.get()) is not None:
        if isinstance(frame, SnapshotError):
            raise frame
        stored = await in_thread(store.write, move, frame)
        if not stored:
            log.warning("images of %s: %s at %d arrived damaged", move, frame.name, frame.offset)
        await context.write(Answer(Kind.OK if stored else Kind.BAD, frame.sequence).message())


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


# ---------------------------------------------------------------- the source's side


def push_channels(endpoint: str, credentials: Credentials | None, node: str, streams: int) -> list[grpc.aio.Channel]:
    """One connection to the target per stream. The caller closes them."""
    return [open_channel(endpoint, credentials, node) for _ in range(streams)]


class PushCall:
    """A `Stream` over one gRPC call."""

    def __init__(self, channel: grpc.aio.Channel, move: str) -> None:
        self._call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((MOVE_KEY, move),))

    async def send(self, frame: Frame) -> bool:
        """False if the stream has ended: `receive` then raises the reason."""
        try:
            await self._call.write(frame.header())
            if frame.payload_bytes:
                await self._call.write(frame.payload)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def receive(self) -> Answer | None:
        """The next answer, None when the target has ended the stream normally."""
        try:
            message = await self._call.read()
            if message is not grpc.aio.EOF:
                return parse_answer(message)
            code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            raise translate(error, "the target", METHOD) from error
        except asyncio.CancelledError:
            # gRPC cancels the reader of a call that it ended itself; only a cancellation of this task is passed on.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise Unreachable("the stream of images was cancelled") from None
        if code is not grpc.StatusCode.OK:
            raise Unreachable(f"the target ended the stream of images: {code.name}: {await self._call.details()}")
        return None

    async def done(self) -> None:
        """Announces that no more chunks follow; the target ends the stream when it has answered all of them."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # ended already: `receive` raises the reason

    def cancel(self) -> None:
        self._call.cancel()

    async def ended(self) -> None:
        """A cancelled call leaves nothing behind."""
