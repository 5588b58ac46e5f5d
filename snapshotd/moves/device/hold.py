"""Hands the device memory of one process over to the holder, which copies it from the GPU while it is sent.

Nothing is copied while the job waits, an undo maps the memory again, and the host memory that a move needs does not depend on
the rank's size: the stripes are rings (snapshotd/transport/device/ring.py).

Invariant: memory is released by its process only when the holder keeps all of it, until the move has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.cuda.driver import Gpus
from snapshotd.holder.backed import BackedHolder
from snapshotd.holder.client import Holder
from snapshotd.holder.copying import Copying, stripe_sizes
from snapshotd.inprocess import devmem, holding
from snapshotd.inprocess.holding import CannotExport, HeldBlock
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.source_channel import SourceChannel, reason
from snapshotd.moves.device.standstill import LOCK_S
from snapshotd.moves.journal import Journal
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import StripedProcess
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)


def key_of(move: str, process: Process) -> str:
    return f"{move}/{process.pid}"


class Hold:
    """One process whose memory the holder takes over."""

    def __init__(
        self,
        node: Node,
        move: str,
        process: Process,
        gpu: str,
        folder: Path,
        names: Sequence[str],
        slot_bytes: int,
        *,
        whole: bool = False,
    ) -> None:
        """`whole`: as for Copying."""
        self._holder, self._names, self._slot_bytes = node.holder, list(names), slot_bytes
        self._move, self.key = move, key_of(move, process)
        found = holding.find(process)
        if found is None:
            raise RankGone(f"the shim is not active in process {process.pid}", where=Where.SOURCE_RUNNING)
        self._holding = found
        self._copying = Copying(gpu, folder, names, slot_bytes, node.holder, node.config.gpu_library_dir, whole=whole)
        self._blocks: list[HeldBlock] = []

    async def prepare(self, *, sends: bool) -> None:
        """While the job runs. `sends`: False if the target takes the memory over. Raises a SnapshotError, OSError or
        CannotExport; nothing has happened then."""
        await in_thread(self._holding.must_know_how)
        await in_thread(self._holding.ready, len(self._names), self._slot_bytes)
        if sends:
            await self._copying.start()

    def hand_over(self, timeout_s: float) -> int:
        """Blocking. Returns the bytes. As `Holding.hand_over`, but memory that cannot be exported is GpuFailed."""
        try:
            return self._holding.hand_over(timeout_s, self._keep)
        except CannotExport as error:
            raise GpuFailed(f"its device memory cannot be exported: {error}", where=Where.SOURCE_FROZEN) from error

    def _keep(self, blocks: Sequence[HeldBlock], fds: Sequence[int]) -> None:
        self._holder.keep(self.key, blocks, fds)
        self._blocks += blocks

    @property
    def blocks(self) -> Sequence[HeldBlock]:
        """What was handed over, in the order of the stripes."""
        return self._blocks

    @property
    def sizes(self) -> list[int]:
        """Of its stripes."""
        return stripe_sizes(self._blocks, len(self._names), self._slot_bytes)

    async def pass_on(self, channel: SourceChannel, pid: int) -> list[asyncio.Task[None]]:
        """Copies and sends from now on. The tasks end when all is copied, and the target knows what comes. One that takes the
        memory over has it when this returns. `pid`: of the process, in its own pid namespace. Raises a SnapshotError."""
        if channel.takes_over:
            await channel.allocate(pid, self.blocks, self.key)
            return []
        tasks = [self._copying.begin(self.key, self.sizes, channel.advance)]
        if channel.fills:
            telling = channel.allocate(pid, self.blocks, self.key)
            tasks.append(asyncio.create_task(telling, name=f"describe memory of {self._move}"))
        return tasks

    def begin_whole(self) -> asyncio.Task[None]:
        """Copies all of it into the files. The task ends when that is done."""
        return self._copying.begin(self.key, self.sizes, lambda names, done: None)

    async def close(self) -> None:
        """Stops copying; the holder still keeps the memory. Idempotent."""
        await self._copying.close()
        self._holding.close()


def take_back(holder: Holder, move: str, one: StripedProcess, timeout_s: float) -> int:
    """Undo: gives a process its memory back; the bytes. Blocking. Raises GpuFailed or Timeout (retry later), and Lost."""
    return give(holder, key_of(move, one.process), one.process, len(one.stripes), one.slot_bytes, timeout_s)


def give(
    holder: Holder, key: str, process: Process, stripes: int, slot_bytes: int, timeout_s: float, *, keep: bool = False
) -> int:
    """Gives a process whose memory is offloaded what is kept under the key; the bytes. The numbers are those with which it
    was offloaded. Blocking. Raises as `take_back`. `keep`: it is still kept, and shared, until the process owns a copy."""
    kept_bytes = holder.kept().get(key)
    if kept_bytes is None:
        raise Lost(f"the device memory of process {process.pid} is gone: the process that kept it has ended")
    found = holding.find(process)
    if found is None:
        raise RankGone(f"process {process.pid} has ended", where=Where.ENDED)
    wanted_bytes = found.ready(stripes, slot_bytes)
    if kept_bytes != wanted_bytes:
        found.close()
        raise Lost(
            f"part of the device memory of process {process.pid} is gone: {kept_bytes} bytes are kept, {wanted_bytes} were"
            " handed over"
        )
    size = found.take_back(timeout_s, holder.held(key), holder.count(key))
    if not keep:
        holder.drop([key])  # the process has it; a second copy of a block has room only without this
    return size


def imports(process: Process) -> bool:
    """Whether it has memory that was given to it, and is not its own. Blocking."""
    found = holding.find(process)
    return found is not None and found.has_imported()


def own(process: Process, stripes: int, slot_bytes: int, timeout_s: float) -> None:
    """Makes memory that was taken back the process's own, because the driver can neither export imported memory nor restore a
    process that has some. Blocking. Idempotent. Raises Timeout. Any other failure is only logged: the rank continues, and its
    next move tries again."""
    found = holding.find(process)
    if found is None or not found.has_imported():
        return
    try:
        found.ready(stripes, slot_bytes)
        found.own(timeout_s)
    except Timeout:  # a call into CUDA has not returned: the job may run only if the process itself agrees
        raise
    except (SnapshotError, CannotExport) as error:
        log.warning(
            "process %d: its device memory was handed back, but cannot be made its own yet: %s",
            process.pid,
            reason(error),
        )


async def own_rest(gpus: Gpus, processes: Sequence[Process], limit_s: float) -> None:
    """Before the driver's checkpoint of processes at a standstill: makes memory their own that they got from another process
    and have not handed over again. Raises GpuFailed, because the driver could not restore them otherwise; Timeout."""
    for process in processes:
        if not process.alive() or not await in_thread(imports, process):
            continue
        await gpus.unlock(process, LOCK_S)
        await in_thread(own, process, devmem.STRIPES, devmem.SLOT_BYTES, limit_s)
        await gpus.lock(process, LOCK_S)
        if await in_thread(imports, process):
            raise GpuFailed(
                f"process {process.pid} has device memory that another process created, and cannot be checkpointed with it",
                remedy="free memory on its GPU, so that there is room for a copy of its largest block",
                where=Where.SOURCE_FROZEN,
            )


def held_bytes(holder: Holder, move: str) -> int:
    """What is kept for a move. Blocking."""
    return sum(size for key, size in holder.kept().items() if key.startswith(f"{move}/"))


def sweep_ended(holder: BackedHolder, journal: Journal) -> None:
    """At start: lets the memory go that moves have left, on their source or their target, and takes duplicates of what ranks
    have handed over that are still on their way. Blocking. Raises GpuFailed."""
    for move, keys in groupby(sorted(holder.kept()), lambda key: key.partition("/")[0]):
        known = journal.find(move)
        if known is None or known.ended_unix_s:
            let_go(holder, move)
        elif known.begin.role == "source":  # a target has lost the channel that filled it
            for key in keys:
                holder.adopt(key)


def let_go(holder: Holder, move: str) -> None:
    """The move has ended. Blocking. Idempotent."""
    holder.leave(move)
    holder.drop([key for key in holder.kept() if key.startswith(f"{move}/")])
