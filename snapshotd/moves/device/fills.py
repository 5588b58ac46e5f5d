"""The memory that the target of a move creates on its GPU, fills while stripes arrive, and gives to the restored processes.

So the target needs host memory for rings only, and nothing is copied to the GPU after the restore.

Invariant: a process gets memory only when all its bytes have arrived, verified, and are in it. Nothing of it outlives the
move, except in the process that got it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from snapshotd.api.errors import GpuFailed, Internal, SnapshotError, Where, WrongState
from snapshotd.holder.filling import Filling
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import hold, stripe_files
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.spans import span
from snapshotd.transport.device.incoming import Incoming

log = logging.getLogger(__name__)


def _pid_of(name: str) -> int:
    """The process whose stripe it is: device-PID-NUMBER."""
    return int(name.split("-")[1])


async def _filled(one: Filling, blocks: Sequence[HeldBlock]) -> int:
    """Its process ends as soon as the memory is filled, while the rank is restored: until then it has the memory mapped, and
    to end it takes the driver a while."""
    size = await one.begin(blocks)
    await one.close()
    return size


class Fills:
    """All processes of one move. Used on the loop that made it."""

    part = "refill"

    def __init__(
        self, node: Node, move: str, gpu: str, folder: Path, names: Sequence[str], slot_bytes: int, incoming: Incoming
    ) -> None:
        self._holder, self._move, self._incoming = node.holder, move, incoming
        self._names: dict[int, list[str]] = {}
        for name in names:
            self._names.setdefault(_pid_of(name), []).append(name)
        library = node.config.gpu_library_dir
        self._fillings = {
            pid: Filling(gpu, folder, own, slot_bytes, node.holder, library, self._key(pid))
            for pid, own in self._names.items()
        }
        self._tasks: dict[int, asyncio.Task[int]] = {}

    def _key(self, pid: int) -> str:
        return f"{self._move}/to-{pid}"

    async def start(self) -> None:
        """Attaches to the GPU, which takes seconds; the job runs. Raises a SnapshotError."""
        await in_thread(self._holder.start, self._move)
        started = (one.start() for one in self._fillings.values())
        for failed in await asyncio.gather(*started, return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed

    async def allocate(self, pid: int, blocks: Sequence[HeldBlock], key: str) -> None:
        """The memory of a process has left its source: creates it here, and fills it. Idempotent. A failure ends the
        channel, so that the source learns of it. `key`: for a target that takes it over."""
        one = self._fillings.get(pid)
        if one is None:
            raise WrongState(f"no stripes of process {pid} were announced", where=Where.SOURCE_FROZEN)
        if pid in self._tasks:
            return

        def ended(task: asyncio.Task[int]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                return
            if not isinstance(error, SnapshotError):
                log.error("filling device memory failed unexpectedly", exc_info=error)
                error = Internal(f"filling device memory failed unexpectedly: {error!r}")
            self._incoming.fail(error)

        task = self._tasks[pid] = asyncio.create_task(_filled(one, blocks), name=f"memory of {self._key(pid)}")
        task.add_done_callback(ended)

    async def give(self, processes: Mapping[int, Process], device: Sequence[OffloadedMemory], limit_s: float) -> int:
        """Waits until all stripes have arrived and are on the GPU, and gives the memory to the restored processes, which
        make it their own. Returns the bytes."""
        stripe_files.must_match(device, await self._incoming.wait(limit_s))
        total = 0
        for one in device:
            task = self._tasks.get(one.pid)
            if task is None:
                raise GpuFailed(
                    f"the source did not describe the memory of process {one.pid}", where=Where.SOURCE_FROZEN
                )
            try:
                async with asyncio.timeout(limit_s):
                    total += await asyncio.shield(task)
            except TimeoutError as error:
                raise GpuFailed(f"process {one.pid} was not filled in {limit_s:.0f} s") from error
            await in_thread(self._give, processes[one.pid], one, limit_s)
        return total

    def _give(self, process: Process, one: OffloadedMemory, limit_s: float) -> None:
        key, stripes = self._key(one.pid), len(one.stripes)
        try:
            with span("give memory"):
                size = hold.give(self._holder, key, process, stripes, one.slot_bytes, limit_s)
        except Lost as lost:
            raise GpuFailed(str(lost), where=Where.SOURCE_FROZEN) from lost
        log.info("process %d got %d bytes of device memory that were filled while they arrived", process.pid, size)
        with span("make memory its own"):
            hold.own(process, stripes, one.slot_bytes, limit_s)

    async def close(self) -> None:
        """Releases what no process got. Idempotent. Never fails: what is left is released when the move ends here."""
        await asyncio.gather(*(one.close() for one in self._fillings.values()), return_exceptions=True)
        try:
            await in_thread(self._holder.drop, [self._key(pid) for pid in self._names])
        except SnapshotError as error:
            log.warning("device memory of %s is not released yet: %s", self._move, error.message)
