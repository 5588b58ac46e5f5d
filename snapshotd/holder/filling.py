"""Has memory on this node's GPU filled from stripes that arrive: the daemon's side of the process that fills.

Invariant: memory counts as filled only with bytes that were verified and are on the GPU. If the process that fills dies,
another one takes its place; what was filled is not filled again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from snapshotd.api.errors import GpuFailed, Internal
from snapshotd.holder.client import Holder
from snapshotd.holder.copying import READY_S, REPLACED, stripe_sizes
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.child import Child

log = logging.getLogger(__name__)

_FILLER = "snapshotd.holder.filler"
#: Of one message.
_BLOCKS = 1000


class Filling:
    """The memory of one process on its way from its stripes. Used on the loop that started it."""

    def __init__(
        self,
        gpu: str,
        folder: Path,
        names: Sequence[str],
        slot_bytes: int,
        holder: Holder,
        library_dir: str,
        key: str,
    ) -> None:
        self._gpu, self._folder, self._names, self._key = gpu, folder, list(names), key
        self._slot_bytes, self._holder, self._library_dir = slot_bytes, holder, library_dir
        self._child: Child | None = None
        self._task: asyncio.Task[int] | None = None
        self._allocated = asyncio.Event()
        self._filled = [0] * len(self._names)

    async def start(self) -> None:
        """Starts the process, which attaches to the GPU. Raises Internal or GpuFailed."""
        settings = {
            "gpu": self._gpu,
            "files": [str(self._folder / name) for name in self._names],
            "slot_bytes": self._slot_bytes,
            "holder": str(self._holder.path),
            "key": self._key,
        }
        self._child = await Child.start(_FILLER, settings, library_dir=self._library_dir)
        await self._child.ready(READY_S)

    def begin(self, blocks: Sequence[HeldBlock]) -> asyncio.Task[int]:
        """Creates this memory and fills it. The task ends with the bytes when all of it is filled; the holder keeps it under
        the key."""
        self._task = asyncio.create_task(self._carry(list(blocks)), name=f"fill {self._key}")
        return self._task

    async def allocated(self) -> None:
        """Waits until the memory exists. Raises what the task raises."""
        assert self._task is not None
        waiting = asyncio.ensure_future(self._allocated.wait())
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not self._allocated.is_set():
                self._task.result()
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """The holder still keeps the memory. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._end_child()

    async def _carry(self, blocks: list[HeldBlock]) -> int:
        for left in reversed(range(REPLACED + 1)):
            try:
                if self._child is None:
                    await in_thread(self._holder.kept)  # which starts another holder if it has ended
                    await self.start()
                return await self._fill(blocks)
            except (GpuFailed, Internal) as error:
                log.warning("filling %s: %s", self._key, error.message)
                if not left:
                    raise
                await self._end_child()
        raise AssertionError

    async def _end_child(self) -> None:
        """Idempotent. What it still says is not heard by the next one."""
        if self._child is not None:
            self._child.kill()
            await self._child.close()
            self._child = None

    async def _fill(self, blocks: list[HeldBlock]) -> int:
        child = self._child
        assert child is not None
        sizes = stripe_sizes(blocks, len(self._names), self._slot_bytes)
        for at in range(0, max(1, len(blocks)), _BLOCKS):
            some = [[one.address, one.bytes, one.device] for one in blocks[at : at + _BLOCKS]]
            child.say({"blocks": some, "more": at + _BLOCKS < len(blocks)})
        ended: set[int] = set()
        while len(ended) < len(self._names):
            message = await child.hear()
            if "allocated" in message:
                self._allocated.set()
                continue
            self._filled = message["filled"]
            ended.add(int(message["last"]))
        if self._filled != sizes:
            raise GpuFailed(f"{sum(self._filled)} bytes of {self._key} were filled, {sum(sizes)} were expected")
        return sum(sizes)
