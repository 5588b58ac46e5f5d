"""The image channel over gRPC, `/snapshotd.v1.Target/Push`: raw bytes both ways, without protobuf. It works wherever gRPC
does. Bulk connections (bulk_sender.py) are faster, where the network allows a second port.

Invariant: every chunk is answered once, in order: OK after it is verified and stored, BAD if it must be sent again. A stream
that ends early ends with one ERROR answer that carries an error of the taxonomy, never a traceback. At most WINDOW + 1
chunks of a stream are in this daemon's memory: HTTP/2 flow control holds the sender back. Every chunk has a cryptographic
digest, and the source signs the list of all: the network processes, which pass them on, can replace none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from snapshotd.api.calls import CallEnded, CallFailed, Channel
from snapshotd.api.client import translate
from snapshotd.api.errors import Busy, Damaged, Denied, SnapshotError
from snapshotd.api.methods import PUSH
from snapshotd.network.dispatch import Context
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.logs import Throttle
from snapshotd.transport.image.frame import Answer, Frame, Kind, parse_answer, parse_header
from snapshotd.transport.image.malloc_tuning import freed_blocks_kept
from snapshotd.transport.image.store import MOVE_NAME, ImageStore

log = logging.getLogger(__name__)

MOVE_KEY = "move"  # the metadata that names the move

#: Chunks of one stream in transit at a time: one is written while the next one arrives.
WINDOW = 2
MAX_STREAMS_PER_MOVE = 16
HANG_UP_S = 10.0  # how long a sender may take to close a stream that has failed
_MAX_COMPLAINTS = 30  # log records about the images of one caller in a minute

_SAME_VERSION = "run the same version of snapshotd on all nodes"

#: Raises Denied or another error if this caller may not send images of this move.
Authorise = Callable[[Context, str], Awaitable[None]]


# ---------------------------------------------------------------- the target's side


def push_handler(store: ImageStore, authorise: Authorise) -> Callable[[Context], Awaitable[None]]:
    """What receives images into `store`, once for each stream."""
    streams: Counter[str] = Counter()
    complaints = Throttle(log, _MAX_COMPLAINTS, "images of %s")

    async def push(context: Context) -> None:
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
            what = move or "an unnamed move", error.code, error.message
            complaints.warning(context.caller, "images of %s: %s: %s", *what)
            await context.write(Answer(Kind.ERROR, text=error.to_wire()).message())
            await _wait_until_sender_closes(context)

    return push


def _move_of(context: Context) -> str:
    move = context.metadata.get(MOVE_KEY, "")
    if not MOVE_NAME.fullmatch(move):
        raise Denied(f"a stream of images must name its move, not {move!r}")
    return move


async def _wait_until_sender_closes(context: Context) -> None:
    """A sender that is writing when the stream ends gets gRPC's own failure and never the ERROR: it must end first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            while await context.read() is not None:
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
        while (header := await context.read()) is not None:
            frame = parse_header(header)
            if (
                not frame.strong
            ):  # the network process, which passed it on, could have found another chunk for its digest
                raise Damaged(f"{frame.name}: a chunk over gRPC has a weak digest", remedy=_SAME_VERSION)
            if frame.payload_bytes:
                frame.payload = await _read_payload(context, frame)
            await arrived.put(frame)
    except SnapshotError as error:
        await arrived.put(error)
    else:
        await arrived.put(None)


async def _read_payload(context: Context, frame: Frame) -> bytes:
    payload = await context.read()
    if payload is None:
        raise Damaged(f"{frame.name}: the stream ended before the payload of the chunk at {frame.offset}")
    if len(payload) != frame.payload_bytes:
        got = f"{len(payload)} bytes instead of {frame.payload_bytes}"
        raise Damaged(f"{frame.name}: the chunk at {frame.offset} has {got}")
    return payload


async def _store_chunks(
    store: ImageStore, move: str, context: Context, arrived: asyncio.Queue[Frame | SnapshotError | None]
) -> None:
    while (frame := await arrived.get()) is not None:
        if isinstance(frame, SnapshotError):
            raise frame
        with store.threads(move):
            answer = await in_thread(store.take, move, frame)
        await context.write(answer.message())


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


# ---------------------------------------------------------------- the source's side


class PushCall:
    """A `Stream` over one call."""

    strong = True

    def __init__(self, channel: Channel, move: str) -> None:
        self._call = channel.stream(PUSH, metadata={MOVE_KEY: move})

    async def send(self, frame: Frame) -> bool:
        """False if the stream has ended: `receive` then raises the reason."""
        await in_thread(frame.prepare)
        try:
            await self._call.write(frame.header())
            if frame.payload_bytes:
                await self._call.write(memoryview(frame.payload))
        except CallEnded:
            return False
        return True

    async def receive(self) -> Answer | None:
        """The next answer, None when the target has ended the stream normally."""
        try:
            message = await self._call.read()
        except CallFailed as failed:
            raise translate(failed, "the target", "Push") from failed
        return None if message is None else parse_answer(message)

    async def done(self) -> None:
        """Announces that no more chunks follow; the target ends the stream when it has answered all of them."""
        with contextlib.suppress(CallEnded):  # then `receive` raises the reason
            await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()

    async def ended(self) -> None:
        """A cancelled call leaves nothing behind."""
