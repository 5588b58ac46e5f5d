"""The node's one helper process, started when it is needed and again after it was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from snapshotd.cuda import refusals
from snapshotd.cuda.link import Link, Lost

log = logging.getLogger(__name__)

#: cuInit wakes every GPU; on a large node whose driver does not stay loaded that takes a second or two for each.
INIT_S = 60.0


class Links:
    """All links of the daemon; the last one is in use, those before it may still be dying."""

    def __init__(self, library_dir: str) -> None:
        self._library_dir = library_dir
        self._links: list[Link] = []
        self._starting = asyncio.Lock()
        self._closed = False

    async def current(self) -> Link:
        """A helper that takes questions; Lost when there can be none."""
        async with self._starting:
            if self._closed:
                raise Lost("the daemon is ending", by_us=False)
            if not self._links or not self._links[-1].alive:
                self._links = [link for link in self._links if not link.ended]
                self._links.append(await Link.start(self._library_dir))
                log.info("started the GPU helper (pid %d)", self._links[-1].pid)
            return self._links[-1]

    async def initialised(self) -> Link:
        """The same, with libcuda loaded and initialised: no question's time limit has to allow for that.

        GpuFailed when it does not come up. Where there is no driver every answer of the link says so.
        """
        link = await self.current()
        try:
            await link.initialise(INIT_S)
        except TimeoutError as error:
            raise refusals.unusable(f"the CUDA driver did not come up within {INIT_S:g} s (cuInit)") from error
        return link

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[Link]:
        """A helper for one question that may hang: killing it disturbs nobody."""
        if self._closed:
            raise Lost("the daemon is ending", by_us=False)
        link = await Link.start(self._library_dir)
        try:
            yield link
        finally:
            await link.close()

    async def close(self) -> None:
        """Ends the helper for good."""
        async with self._starting:
            self._closed = True
            links, self._links = self._links, []
        for link in links:
            await link.close()
