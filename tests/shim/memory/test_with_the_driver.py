"""Tests of the daemon's order: park, lock and unlock the driver, OFFLOAD, checkpoint the rest with the driver; and back.

Also of the other order, locking first, which is used only for threads that do not leave the driver: a thread that waits
for the driver's lock gets a share of it once it is unlocked, although it is parked.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Timeout
from snapshotd.cuda.driver import Gpus
from snapshotd.moves.device import parts, standstill
from tests.fakes.cuda_fake import GpuNode
from tests.sampling import Sampler
from tests.shim.jobs import STUCK_S, until
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DROP, OFFLOAD, DeviceJob, Refused, refused

ROUNDS = 30


@pytest.fixture
async def gpus(node: GpuNode) -> AsyncIterator[Gpus]:
    gpus = Gpus(node.library_dir)
    yield gpus
    await gpus.close()


async def _still(job: DeviceJob, gpus: Gpus) -> None:
    """Parks the job outside the driver, waits for its GPU work, and unlocks the driver for the copies."""
    await asyncio.to_thread(job.park_threads, outside_driver=True)
    await gpus.lock(job.process, STUCK_S)
    await gpus.unlock(job.process, STUCK_S)


def _all_sleep(job: DeviceJob) -> bool:
    tasks = Path(f"/proc/{job.pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)


async def caught_at_the_lock(job: DeviceJob, gpus: Gpus) -> None:
    """Parks threads while they wait for the driver's lock, and unlocks it, so that they get their shares."""
    await gpus.lock(job.process, STUCK_S)
    until(lambda: _all_sleep(job))
    await asyncio.to_thread(job.park_threads)
    await gpus.unlock(job.process, STUCK_S)


async def _park(job: DeviceJob, gpus: Gpus) -> bool:
    """Parks and offloads. False: a thread was parked while allocating, and the job was released."""
    await standstill.still(gpus, [job.process], [job.process], parts.Parts())
    await gpus.unlock(job.process, STUCK_S)
    try:
        await asyncio.to_thread(job.ask, OFFLOAD)
    except Refused as error:
        if error.status != errno.EAGAIN:
            raise
        await asyncio.to_thread(job.release)
        return False
    return True


async def test_memory_is_offloaded_and_filled_while_threads_allocate(start_job: Start, gpus: Gpus) -> None:
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


async def test_a_thread_parked_outside_the_driver_has_no_share_of_its_lock(
    start_job: Start, gpus: Gpus, sampled: Sampler
) -> None:
    job = start_job("grow 1", "calling")
    for _ in sampled(range(ROUNDS), 8):
        await asyncio.to_thread(job.ready)
        await _still(job, gpus)
        await asyncio.to_thread(job.ask, OFFLOAD)
        await asyncio.to_thread(job.fill)
        await asyncio.to_thread(job.release)
    assert job.do("stop") == "done"
    assert job.do("check") == "same"


async def test_a_thread_parked_at_the_drivers_lock_gets_a_share_once_it_is_unlocked(
    start_job: Start, gpus: Gpus
) -> None:
    """A call that waits for such a thread is found while the thread can be released, and then returns."""
    job = start_job("grow 1", "calling")
    await asyncio.to_thread(job.ready)
    await caught_at_the_lock(job, gpus)
    with refused(errno.EAGAIN, "with a lock that others wait for"):
        await asyncio.to_thread(job.ask, OFFLOAD)
    assert not job.state().offloaded
    await asyncio.to_thread(job.release)
    await _still(job, gpus)
    await asyncio.to_thread(job.ask, OFFLOAD)
    job.is_settled(offloaded=True)
    await asyncio.to_thread(job.come_back)


async def test_driver_cannot_be_locked_while_a_parked_thread_has_a_share(start_job: Start, gpus: Gpus) -> None:
    job = start_job("calling")
    await caught_at_the_lock(job, gpus)
    for _ in range(2):  # an attempt that timed out has given no share to another thread
        with pytest.raises(Timeout):
            await gpus.lock(job.process, 0.3)
    await asyncio.to_thread(job.release)
    await gpus.lock(job.process, STUCK_S)
    await gpus.unlock(job.process, STUCK_S)
    assert job.do("stop") == "done"
