"""The fake or the real CUDA driver, and what tests of both do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from snapshotd.cuda.driver import Gpus, Pair
from snapshotd.proc.tree import Process
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.device_job import DeviceJob

MIB = 1 << 20
LOCK_S, MEMORY_S = 20.0, 60.0
STRANGE = "GPU-00000000-0000-4000-8000-00000000dead"
SMALL = ("--mib", "8")

Start = Callable[..., DeviceJob]


@dataclass
class Driver:
    """The fake or the real driver: its environment, and how to fill its GPU."""

    environment: dict[str, str]
    gpus: Gpus
    fake: GpuNode | None

    def filling(self, free_bytes: int) -> tuple[str, ...]:
        """Options of a job that leaves no room for another context: 20 MiB on the fake, several hundred on a real GPU."""
        mib, blocks = (free_bytes // MIB - 24, 4) if self.fake else (free_bytes // MIB - 900, 64)
        return "--mib", str(mib // (2 * blocks) * 2 * blocks), "--blocks", str(blocks)


async def pairs_of(gpus: Gpus) -> list[Pair]:
    """Maps each GPU of the node to itself."""
    return [Pair(gpu.uuid, gpu.uuid) for gpu in (await gpus.inventory()).gpus]


async def check_point(gpus: Gpus, process: Process) -> None:
    await gpus.lock(process, LOCK_S)
    await gpus.checkpoint(process, MEMORY_S)


async def go_on(gpus: Gpus, process: Process) -> None:
    await gpus.restore(process, await pairs_of(gpus), MEMORY_S)
    await gpus.unlock(process, LOCK_S)


async def holders(gpus: Gpus) -> dict[int, int]:
    """Current device memory by process. Waits, because the inventory may be a second old."""
    await asyncio.sleep(1.1)
    inventory = await gpus.inventory()
    assert not inventory.problem
    return {each.pid: each.memory_bytes for gpu in inventory.gpus for each in gpu.processes}
