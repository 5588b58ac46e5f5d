"""Runs a look of the daemon again and again in the background.

Invariant: a look that fails is logged, and the next one follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Repeated:
    def __init__(self, name: str, look: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._name, self._look, self._every_s = name, look, every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._look()
            except Exception:
                log.exception("%s: this look failed, and is repeated in %g s", self._name, self._every_s)
