"""Provides the node's helper process: started when it is needed, and again after it was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from snapshotd.cuda import refusals
from snapshotd.cuda.helper_process import HelperProcess, Lost

log = logging.getLogger(__name__)

#: cuInit wakes every GPU; on a node whose driver does not stay loaded that takes a second or two for each.
INIT_S = 60.0


class HelperPool:
    """The last helper is in use; earlier ones may still be exiting."""

    def __init__(self, library_dir: str) -> None:
        self._library_dir = library_dir
        self._helpers: list[HelperProcess] = []
        self._starting = asyncio.Lock()
        self._closed = False

    async def current(self) -> HelperProcess:
        """A helper that accepts requests; Lost if none can be started."""
        async with self._starting:
            if self._closed:
                raise Lost("the daemon is exiting", by_us=False)
            if not self._helpers or not self._helpers[-1].alive:
                self._helpers = [helper for helper in self._helpers if not helper.ended]
                self._helpers.append(await HelperProcess.start(self._library_dir))
                log.info("started the GPU helper (pid %d)", self._helpers[-1].pid)
            return self._helpers[-1]

    async def initialised(self) -> HelperProcess:
        """The same, with libcuda initialised, so that the time limits of requests need not include that.

        GpuFailed if it does not initialise. Without a driver, every answer of the helper reports that.
        """
        helper = await self.current()
        try:
            await helper.initialise(INIT_S)
        except TimeoutError as error:
            raise refusals.unusable(f"the CUDA driver did not initialise within {INIT_S:g} s (cuInit)") from error
        return helper

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[HelperProcess]:
        """A separate helper for a request that may hang: killing it affects no other request."""
        if self._closed:
            raise Lost("the daemon is exiting", by_us=False)
        helper = await HelperProcess.start(self._library_dir)
        try:
            yield helper
        finally:
            await helper.close()

    async def close(self) -> None:
        """Ends the helper for good."""
        async with self._starting:
            self._closed = True
            helpers, self._helpers = self._helpers, []
        for helper in helpers:
            await helper.close()
