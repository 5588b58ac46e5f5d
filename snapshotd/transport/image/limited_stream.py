"""A stream of chunks that keeps to a limit: a chunk is sent when the bucket of its link lets it through."""

from __future__ import annotations

import asyncio

from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.frame import Answer, Frame
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.pace import Bucket


class LimitedStream:
    """A `Stream`. `lifted`: once it is set, there is no limit."""

    def __init__(self, stream: Stream, bucket: Bucket, lifted: asyncio.Event) -> None:
        self._stream, self._bucket, self._lifted = stream, bucket, lifted
        self.waited_s = 0.0

    @property
    def strong(self) -> bool:
        return self._stream.strong

    async def send(self, frame: Frame) -> bool:
        await in_thread(frame.prepare)  # what is left out is not sent, and does not count
        self.waited_s += await self._bucket.take(frame.payload_bytes, self._lifted)
        return await self._stream.send(frame)

    async def receive(self) -> Answer | None:
        return await self._stream.receive()

    async def done(self) -> None:
        await self._stream.done()

    def cancel(self) -> None:
        self._stream.cancel()

    async def ended(self) -> None:
        await self._stream.ended()
