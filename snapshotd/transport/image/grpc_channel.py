"""The lane over gRPC, `/snapshotd.v1.Target/Push`: raw bytes both ways, no protobuf around them. It goes wherever gRPC
goes; bulk.py is the faster one beside it, where the network lets a second port through.

Invariant: every chunk that comes in is answered once, in order: OK after it is verified and stored, BAD if it should be
sent again. What ends a stream early is one ERROR answer with an error of the taxonomy, never a traceback. At most
WINDOW + 1 chunks of a stream are in this daemon's memory: a sender that goes on is held back by HTTP/2 flow control.
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

LOG = logging.getLogger(__name__)

SERVICE = "snapshotd.v1.Target"
METHOD = "Push"
MOVE_KEY = "move"  # the metadata that says whose images these are

#: Chunks of one stream on their way at a time: one being written while the next one arrives.
WINDOW = 2
MAX_STREAMS_PER_MOVE = 16
HANG_UP_S = 10.0  # how long a sender may take to notice that its stream is over

Context = grpc.aio.ServicerContext[Any, Any]
#: Raises Denied, or whatever else is wrong with this caller pushing images of this move.
Authorise = Callable[[Context, str], Awaitable[None]]


# ---------------------------------------------------------------- the target's end


def push_handler(store: ImageStore, authorise: Authorise) -> grpc.GenericRpcHandler:
    """What the target's gRPC server needs to receive images into `store`."""
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
            LOG.warning("the images of %s: %s: %s", move or "an unnamed move", error.code, error.message)
            await context.write(Answer(Kind.ERROR, text=error.to_wire()).message())
            await _let_the_sender_hang_up(context)

    behaviour: Any = push  # the stubs know the blocking form of a servicer alone
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(behaviour)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})


def _move_of(context: Context) -> str:
    named = [value for key, value in context.invocation_metadata() or () if key == MOVE_KEY]
    if len(named) != 1 or not isinstance(named[0], str) or not MOVE_NAME.fullmatch(named[0]):
        raise Denied(f"a stream of images must name its move, not {named!r}")
    return named[0]


async def _let_the_sender_hang_up(context: Context) -> None:
    """A sender that is writing when its stream ends gets gRPC's own failure and never sees the ERROR: it ends first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            while await context.read() is not grpc.aio.EOF:
                pass


async def _receive(store: ImageStore, move: str, context: Context) -> None:
    """Reads chunks while earlier ones are stored and answered; whatever goes wrong on either side ends both."""
    arrived: asyncio.Queue[Frame | SnapshotError | None] = asyncio.Queue(WINDOW - 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_read_chunks(context, arrived))
            tasks.create_task(_store_chunks(store, move, context, arrived))
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def _read_chunks(context: Context, arrived: asyncio.Queue[Frame | SnapshotError | None]) -> None:
    """What is wrong with a chunk is queued behind the good ones, so that these are answered first."""
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
            LOG.warning("the images of %s: %s at %d arrived damaged", move, frame.name, frame.offset)
        await context.write(Answer(Kind.OK if stored else Kind.BAD, frame.sequence).message())


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


# ---------------------------------------------------------------- the source's end


def push_channels(endpoint: str, credentials: Credentials | None, node: str, streams: int) -> list[grpc.aio.Channel]:
    """As many connections to a target as streams are wanted. The caller closes them."""
    return [open_channel(endpoint, credentials, node) for _ in range(streams)]


class PushCall:
    """A `Stream` over one gRPC call."""

    def __init__(self, channel: grpc.aio.Channel, move: str) -> None:
        self._call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((MOVE_KEY, move),))

    async def send(self, frame: Frame) -> bool:
        """False where the stream is already over: `receive` then says why."""
        try:
            await self._call.write(frame.header())
            if frame.payload_bytes:
                await self._call.write(frame.payload)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def receive(self) -> Answer | None:
        """The next answer, None when the target has ended the stream in good order."""
        try:
            message = await self._call.read()
            if message is not grpc.aio.EOF:
                return parse_answer(message)
            code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            raise translate(error, "the target", METHOD) from error
        except asyncio.CancelledError:
            # gRPC cancels the reader of a call that it ended itself; only a cancellation of our own task is ours.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise Unreachable("the stream of images was cancelled") from None
        if code is not grpc.StatusCode.OK:
            raise Unreachable(f"the target ended the stream of images: {code.name}: {await self._call.details()}")
        return None

    async def done(self) -> None:
        """No more chunks; the target ends the stream when it has answered all of them."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # over already: `receive` says why

    def cancel(self) -> None:
        self._call.cancel()

    async def ended(self) -> None:
        """Nothing is left of a cancelled call."""
