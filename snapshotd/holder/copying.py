"""Copies held memory into stripes: the daemon's side of the process that copies.

If that process dies, or the holder that it asks, another one takes its place; what was copied is not copied again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from snapshotd.api.errors import GpuFailed, Internal
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import chunks
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.child import Child
from snapshotd.transport.device.ring import BEHIND_BYTES

log = logging.getLogger(__name__)

_COPIER = "snapshotd.holder.copier"
#: A fresh attach to the driver takes seconds.
READY_S = 60.0
#: How many processes that copy may be lost.
REPLACED = 2


def stripe_sizes(blocks: Sequence[HeldBlock], stripes: int, slot_bytes: int) -> list[int]:
    """The bytes of each stripe."""
    places = [(block.address, block.bytes) for block in blocks]
    return [sum(size for _, size in chunks(places, number, stripes, slot_bytes)) for number in range(stripes)]


class Copying:
    """The memory of one process on its way into its stripes. Used on the loop that started it."""

    def __init__(
        self,
        gpu: str,
        folder: Path,
        names: Sequence[str],
        slot_bytes: int,
        holder: Holder,
        library_dir: str,
        *,
        whole: bool = False,
    ) -> None:
        """`whole`: into files that get all of it, not into rings that are sent. Both kinds of files exist."""
        self._gpu, self._folder, self._names = gpu, folder, list(names)
        self._slot_bytes, self._holder, self._library_dir = slot_bytes, holder, library_dir
        self._whole = whole
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = [0] * len(self._names)

    async def start(self) -> None:
        """Starts the process, which attaches to the GPU; the job may run. Raises Internal or GpuFailed."""
        settings = {
            "gpu": self._gpu,
            "files": [str(self._folder / name) for name in self._names],
            "slot_bytes": self._slot_bytes,
            "holder": str(self._holder.path),
            "whole": self._whole,
            "behind_bytes": BEHIND_BYTES,
            "from": self._done,
        }
        self._child = await Child.start(_COPIER, settings, library_dir=self._library_dir)
        await self._child.ready(READY_S)

    def begin(
        self, key: str, sizes: Sequence[int], advance: Callable[[Sequence[str], Sequence[int]], None]
    ) -> asyncio.Task[None]:
        """Copies what the holder keeps under `key`, into rings as fast as they are emptied. `advance` is told when they have
        something, and when a stripe is complete. The task ends when all is copied."""
        self._task = asyncio.create_task(self._carry(key, list(sizes), advance), name=f"copy {key}")
        return self._task

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._end_child()

    async def _carry(
        self,
        key: str,
        sizes: list[int],
        advance: Callable[[Sequence[str], Sequence[int]], None],
    ) -> None:
        for left in reversed(range(REPLACED + 1)):
            try:
                if self._child is None:
                    await in_thread(self._holder.kept)  # which starts another holder if it has ended
                    await self.start()
                await self._copy(key, sizes, advance)
                return
            except (GpuFailed, Internal) as error:
                log.warning("copying %s: %s", key, error.message)
                if not left:
                    raise
                await self._end_child()

    async def _end_child(self) -> None:
        """Idempotent. What it still says is not heard by the next one."""
        if self._child is not None:
            self._child.kill()
            await self._child.close()
            self._child = None

    async def _copy(self, key: str, sizes: list[int], advance: Callable[[Sequence[str], Sequence[int]], None]) -> None:
        child = self._child
        assert child is not None
        child.say({"begin": key})
        ended: set[int] = set()
        while len(ended) < len(self._names):
            message = await child.hear()
            self._done = [max(pair) for pair in zip(self._done, message["done"], strict=True)]
            advance(self._names, self._done)
            if "last" in message:
                ended.add(int(message["last"]))
        if self._done != sizes:
            raise GpuFailed(f"{sum(self._done)} bytes of {key} were copied, {sum(sizes)} were handed over")
