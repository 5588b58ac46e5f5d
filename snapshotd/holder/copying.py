"""Copies held memory into stripe files and has it sent: the daemon's side of the process that copies.

Invariant: a part of a file is removed only after the process that sends it was told so, and only behind what was sent. If the
process that copies dies, another one takes its place; what was copied is not copied again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from snapshotd.api.errors import GpuFailed, Internal, SnapshotError
from snapshotd.holder import window
from snapshotd.holder.driver import chunks
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.transport.device.child import Child
from snapshotd.transport.device.outgoing import Outgoing

log = logging.getLogger(__name__)

_COPIER = "snapshotd.holder.copier"
#: A fresh attach to the driver takes seconds.
READY_S = 60.0
_NO_WINDOW = 1 << 62
#: How often what was sent is passed on.
_RELAY_S = 0.005
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
        holder: Path,
        library_dir: str,
        *,
        whole: bool = False,
    ) -> None:
        """`whole`: the files get all of it, not a window."""
        self._gpu, self._folder, self._names = gpu, folder, list(names)
        self._slot_bytes, self._holder, self._library_dir = slot_bytes, holder, library_dir
        self._ahead_bytes = _NO_WINDOW if whole else window.COPIED_AHEAD_BYTES
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = [0] * len(self._names)
        self._free = [0] * len(self._names)
        self._sent = [0] * len(self._names)
        self.failed: SnapshotError | None = None

    async def start(self) -> None:
        """Starts the process, which attaches to the GPU; the job may run. Raises Internal or GpuFailed."""
        settings = {
            "gpu": self._gpu,
            "files": [str(self._folder / name) for name in self._names],
            "slot_bytes": self._slot_bytes,
            "holder": str(self._holder),
            "ahead_bytes": self._ahead_bytes,
            "from": self._done,
        }
        self._child = await Child.start(_COPIER, settings, library_dir=self._library_dir)
        await self._child.ready(READY_S)

    def begin(
        self,
        key: str,
        sizes: Sequence[int],
        outgoing: Callable[[], Outgoing | None],
        advance: Callable[[Sequence[str], Sequence[int]], None],
    ) -> asyncio.Task[None]:
        """Copies what the holder keeps under `key`, as fast as `outgoing` sends it. The task ends when all is copied."""
        self._task = asyncio.create_task(self._carry(key, list(sizes), outgoing, advance), name=f"copy {key}")
        return self._task

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._child is not None:
            self._child.kill()
            await self._child.close()
            self._child = None

    async def _carry(
        self,
        key: str,
        sizes: list[int],
        outgoing: Callable[[], Outgoing | None],
        advance: Callable[[Sequence[str], Sequence[int]], None],
    ) -> None:
        for left in reversed(range(REPLACED + 1)):
            try:
                await self._copy(key, sizes, outgoing, advance)
                return
            except (GpuFailed, Internal) as error:
                log.warning("copying %s: %s", key, error.message)
                if not left:
                    self.failed = error
                    raise
                if self._child is not None:
                    self._child.kill()
                    await self._child.close()
                with contextlib.suppress(GpuFailed, Internal):  # the next attempt fails at once
                    await self.start()

    async def _copy(
        self,
        key: str,
        sizes: list[int],
        outgoing: Callable[[], Outgoing | None],
        advance: Callable[[Sequence[str], Sequence[int]], None],
    ) -> None:
        child = self._child
        assert child is not None
        child.say({"begin": key, "sent": self._sent, "free": self._free})
        relaying = asyncio.create_task(self._relay(child, outgoing))
        try:
            ended: set[int] = set()
            while len(ended) < len(self._names):
                message = await child.hear()
                self._done = [max(pair) for pair in zip(self._done, message["done"], strict=True)]
                advance(self._names, self._done)
                if "last" in message:
                    ended.add(int(message["last"]))
        finally:
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)
        if self._done != sizes:
            raise GpuFailed(f"{sum(self._done)} bytes of {key} were copied, {sum(sizes)} were handed over")

    async def _relay(self, child: Child, outgoing: Callable[[], Outgoing | None]) -> None:
        while True:
            await asyncio.sleep(_RELAY_S)
            sender = outgoing()
            if sender is None:
                continue
            sent = [sender.position(name) for name in self._names]
            if sent == self._sent:
                continue
            self._sent = [max(pair) for pair in zip(self._sent, sent, strict=True)]
            for number, name in enumerate(self._names):
                free = self._sent[number] - window.COPIED_BEHIND_BYTES
                if free > self._free[number]:
                    self._free[number] = free
                    sender.free(name, free)  # before the process that copies may remove it
            child.say({"sent": self._sent, "free": self._free})
