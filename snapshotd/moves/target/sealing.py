"""The seal of an image that has arrived: it is verified, and written to the disk if it lies on one.

A disk may need minutes for that, and only this node sees whether it works. So one request of the source does not wait for it:
the source repeats the request, and learns each time how much of the image the disk has (transport/image/stall.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from snapshotd.api import snapshotd_pb2 as pb

#: How long one request waits for the seal.
ANSWER_S = 5.0

#: Seals the image. Gets what it calls with bytes that the disk has; returns the names of damaged files.
Seal = Callable[[Callable[[int], None]], Coroutine[Any, Any, list[str]]]


class Move(Protocol):
    sealing: Sealing | None


async def answer(moving: Move, request: pb.SealRequest, seal: Seal) -> pb.SealReply:
    """To the first request and to each repeated one, until the source knows how it has ended."""
    if (sealing := moving.sealing) is None or sealing.request != request:
        sealing = moving.sealing = Sealing(request, seal)
    try:
        return await sealing.answer()
    finally:
        if sealing.finished and moving.sealing is sealing:
            moving.sealing = None


class Sealing:
    """One seal. Used on the loop that made it."""

    def __init__(self, request: pb.SealRequest, seal: Seal) -> None:
        """It runs to its end, also if the source does not ask again."""
        self.request, self._synced_bytes = request, 0
        self._task = asyncio.create_task(seal(self._written), name=f"seal {request.move}")
        self._task.add_done_callback(_seen)

    def _written(self, size_bytes: int) -> None:
        self._synced_bytes += size_bytes

    async def answer(self) -> pb.SealReply:
        """What has become of it. A source of an older version does not repeat its request: it waits until the end."""
        await asyncio.wait([self._task], timeout=ANSWER_S if self.request.repeats else None)
        if not self._task.done():
            return pb.SealReply(unfinished=True, synced_bytes=self._synced_bytes)
        return pb.SealReply(damaged=self._task.result())

    @property
    def finished(self) -> bool:
        return self._task.done()


def _seen(task: asyncio.Task[list[str]]) -> None:
    """The source gets the failure, if it still asks."""
    if not task.cancelled():
        task.exception()
