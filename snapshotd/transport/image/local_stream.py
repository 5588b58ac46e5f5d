"""A stream of chunks into an image store of this node: for images that are kept here instead of being sent."""

from __future__ import annotations

import asyncio

from snapshotd.api.errors import SnapshotError
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.frame import Answer, Frame
from snapshotd.transport.image.store import ImageStore


class LocalStream:
    """A `Stream`. Made on the loop that uses it. A chunk is stored when `send` returns."""

    strong = False

    def __init__(self, store: ImageStore, move: str) -> None:
        self._store, self._move = store, move
        self._answers: asyncio.Queue[Answer | SnapshotError | None] = asyncio.Queue()
        self._over = False

    async def send(self, frame: Frame) -> bool:
        if self._over:
            return False
        try:
            with self._store.threads(self._move):
                answer = await in_thread(self._take, frame)
        except SnapshotError as error:
            self._over = True
            self._answers.put_nowait(error)
            return False
        self._answers.put_nowait(answer)
        return True

    def _take(self, frame: Frame) -> Answer:
        frame.prepare()
        return self._store.take(self._move, frame)

    async def receive(self) -> Answer | None:
        answer = await self._answers.get()
        if answer is None or isinstance(answer, SnapshotError):
            self._answers.put_nowait(answer)  # the same for every further call
        if isinstance(answer, SnapshotError):
            raise answer
        return answer

    async def done(self) -> None:
        self._answers.put_nowait(None)

    def cancel(self) -> None:
        self._over = True
        self._answers.put_nowait(None)

    async def ended(self) -> None:
        """Nothing of it is left: `send` itself has written every chunk."""
