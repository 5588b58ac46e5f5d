"""As the daemon goes it: the driver's lock, parked threads, unlock, PARK, the driver's checkpoint of the rest; and back."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest

from snapshotd.cuda.driver import Gpus
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import STUCK_S
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DROP, PARK, DeviceJob, Refused


@pytest.fixture
async def gpus(node: GpuNode) -> AsyncIterator[Gpus]:
    gpus = Gpus(node.library_dir)
    yield gpus
    await gpus.close()


async def _park(job: DeviceJob, gpus: Gpus) -> bool:
    """Whether it worked; if not, a thread was caught, and all run again."""
    await gpus.lock(job.process, STUCK_S)
    await asyncio.to_thread(job.park_threads)
    await gpus.unlock(job.process, STUCK_S)
    try:
        await asyncio.to_thread(job.ask, PARK)
    except Refused as error:
        if error.status != errno.EAGAIN:
            raise
        await asyncio.to_thread(job.let_go)
        return False
    return True


async def test_out_and_back_while_threads_allocate(start_job: Start, gpus: Gpus) -> None:
    job = start_job("grow 2", "segments", "come")
    for _ in range(3):
        await asyncio.to_thread(job.ready)
        while not await _park(job, gpus):
            pass
        assert job.leftovers() == []
        await gpus.lock(job.process, STUCK_S)
        await gpus.checkpoint(job.process, STUCK_S)
        await gpus.restore(job.process, (), STUCK_S)
        await gpus.unlock(job.process, STUCK_S)
        await asyncio.to_thread(job.come_back)
    await asyncio.to_thread(job.ask, DROP)
    assert job.do("stop") == "done"
    assert job.do("check") == "same"
