"""What the product may expect of a CUDA driver, asked through its own client: the same for the stand-in and the real one.

The real one is skipped where there is none; `integration/gpu/run tests/contract/test_cuda.py` runs it where there is.
Every job that goes on must print what an undisturbed run prints, to the byte.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.tree import Process, find_child
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as fake_gpus
from tests.fakes.device_job import DeviceJob

MIB = 1 << 20
LOCK_S, MEMORY_S = 20.0, 60.0
STRANGE = "GPU-00000000-0000-4000-8000-00000000dead"
SMALL = ("--mib", "8")

Start = Callable[..., DeviceJob]


@dataclass
class Driver:
    """One of the two: how to reach it, and how much memory makes its GPU too full for a small job."""

    environment: dict[str, str]
    gpus: Gpus
    fake: GpuNode | None

    def filling(self, free_bytes: int) -> tuple[str, ...]:
        """A job that leaves no room for another one's context: 20 MiB on the stand-in, several hundred on a real GPU."""
        mib, blocks = (free_bytes // MIB - 24, 4) if self.fake else (free_bytes // MIB - 900, 64)
        return "--mib", str(mib // (2 * blocks) * 2 * blocks), "--blocks", str(blocks)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "real", marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="no NVIDIA GPU on this machine")]
        ),
    ]
)
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Driver]:
    fake = None
    if request.param == "stand-in":
        fake = GpuNode(tmp_path / "node-1", fake_gpus("node-1", 2, memory_mib=512), context_mib=20)
    found = Driver(fake.environment if fake else {}, Gpus(fake.library_dir if fake else ""), fake)
    yield found
    await found.gpus.close()


@pytest.fixture
def start(driver: Driver, tmp_path: Path) -> Iterator[Start]:
    jobs: list[DeviceJob] = []

    def begin(*options: str, ready: str = "step 1 ") -> DeviceJob:
        jobs.append(DeviceJob(tmp_path / f"output-{len(jobs)}", driver.environment, *options))
        jobs[-1].wait_for(ready)
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


@pytest.fixture
def gpus(driver: Driver) -> Gpus:
    return driver.gpus


async def pairs_of(gpus: Gpus) -> list[Pair]:
    """Each GPU of the node for itself."""
    return [Pair(gpu.uuid, gpu.uuid) for gpu in (await gpus.inventory()).gpus]


async def check_point(gpus: Gpus, process: Process) -> None:
    await gpus.lock(process, LOCK_S)
    await gpus.checkpoint(process, MEMORY_S)


async def go_on(gpus: Gpus, process: Process) -> None:
    await gpus.restore(process, await pairs_of(gpus), MEMORY_S)
    await gpus.unlock(process, LOCK_S)


# ---------------------------------------------------------------- who has a state


async def test_a_process_without_cuda_has_no_state(gpus: Gpus) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = Process.of(sleeper.pid)
        assert await gpus.state(process) is None
        with pytest.raises(GpuFailed, match="does not use CUDA"):
            await gpus.lock(process, LOCK_S)
        sleeper.kill()
    assert await gpus.state(process) is None


async def test_a_loaded_library_alone_is_no_state(gpus: Gpus, driver: Driver) -> None:
    program = "import ctypes, time; {}; print(flush=True); time.sleep(600)"
    states = []
    for use in ("ctypes.CDLL('libcuda.so.1')", "ctypes.CDLL('libcuda.so.1').cuInit(0)"):
        with subprocess.Popen(
            [sys.executable, "-c", program.format(use)],
            stdout=subprocess.PIPE,
            env={**os.environ, **driver.environment},
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            states.append(await gpus.state(Process.of(child.pid)))
            child.kill()
    assert states == [None, State.RUNNING]


async def test_a_forked_child_has_no_state(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--children", "1")
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    assert await gpus.state(Process.of(child)) is None
    assert await gpus.state(job.process) is State.RUNNING


# ---------------------------------------------------------------- there and back


async def test_the_output_is_that_of_an_undisturbed_run(gpus: Gpus, start: Start) -> None:
    options = (*SMALL, "--steps", "40", "--threads", "2", "--pinned-mib", "2", "--export")
    job = start(*options)
    process = job.process
    assert await gpus.state(process) is State.RUNNING
    await gpus.lock(process, LOCK_S)
    assert await gpus.state(process) is State.LOCKED
    await gpus.checkpoint(process, MEMORY_S)
    assert await gpus.state(process) is State.CHECKPOINTED
    await gpus.restore(process, await pairs_of(gpus), MEMORY_S)
    assert await gpus.state(process) is State.LOCKED
    await gpus.unlock(process, LOCK_S)
    assert await gpus.state(process) is State.RUNNING
    assert job.finish() == start(*options, "--pace-s", "0", ready="DONE").lines()


async def test_a_locked_job_makes_no_step(gpus: Gpus, start: Start) -> None:
    job = start("--mib", "1", "--blocks", "1", "--pace-s", "0", "--steps", "1000000")
    await gpus.lock(job.process, LOCK_S)
    await asyncio.sleep(0.2)  # for a line that was being printed
    before = job.steps()
    await asyncio.sleep(0.5)
    assert job.steps() == before
    await gpus.unlock(job.process, LOCK_S)
    job.wait_for_steps(3)


async def test_nothing_of_the_gpu_is_held_while_checkpointed(gpus: Gpus, start: Start) -> None:
    """No device file is open or mapped, and NVML knows the process no more: so CRIU can dump it."""
    job = start("--mib", "64")
    assert job.pid in await holders(gpus)
    await check_point(gpus, job.process)
    assert "/dev/nvidia" not in Path(f"/proc/{job.pid}/maps").read_text()
    open_files = [os.readlink(entry) for entry in Path(f"/proc/{job.pid}/fd").iterdir()]
    assert not [name for name in open_files if name.startswith("/dev/nvidia")]
    assert job.pid not in await holders(gpus)
    await go_on(gpus, job.process)
    assert (await holders(gpus))[job.pid] >= 64 * MIB


async def holders(gpus: Gpus) -> dict[int, int]:
    """Device memory by process, now: the inventory may be a second old."""
    await asyncio.sleep(1.1)
    inventory = await gpus.inventory()
    assert not inventory.problem
    return {each.pid: each.memory_bytes for gpu in inventory.gpus for each in gpu.processes}


async def test_the_inventory_names_the_gpus(gpus: Gpus) -> None:
    inventory = await gpus.inventory()
    assert re.fullmatch(r"\d{3}\.[\d.]+", inventory.driver_version)
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))
    for gpu in inventory.gpus:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid)
        assert gpu.name
        assert 0 < gpu.memory_free_bytes <= gpu.memory_bytes


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs root")
async def test_a_process_in_its_own_pid_namespace(gpus: Gpus, driver: Driver) -> None:
    """Asked for by the pid it has out here."""
    program = "import ctypes, time; ctypes.CDLL('libcuda.so.1').cuInit(0); print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, **driver.environment},
    ) as space:
        try:
            assert space.stdout is not None
            space.stdout.readline()
            process = find_child(space.pid, 1)
            await check_point(gpus, process)
            assert await gpus.state(process) is State.CHECKPOINTED
            await go_on(gpus, process)
            assert await gpus.state(process) is State.RUNNING
        finally:
            space.kill()


# ---------------------------------------------------------------- what is refused, and what that leaves


async def test_a_verb_in_the_wrong_state_changes_nothing(gpus: Gpus, start: Start) -> None:
    process = start(*SMALL).process
    with pytest.raises(GpuFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
        await gpus.checkpoint(process, MEMORY_S)
    assert await gpus.state(process) is State.RUNNING
    await check_point(gpus, process)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
        await gpus.unlock(process, LOCK_S)
    assert await gpus.state(process) is State.CHECKPOINTED


async def test_a_busy_gpu_is_locked_when_its_work_is_done(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--busy-ms", "4000", ready="busy 0")
    with pytest.raises(Timeout, match=r"did not finish in 0\.3 s"):
        await gpus.lock(job.process, 0.3)
    assert await gpus.state(job.process) is State.RUNNING
    await gpus.lock(job.process, LOCK_S)
    assert await gpus.state(job.process) is State.LOCKED


async def test_managed_memory_is_refused_and_the_job_goes_on(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--managed-mib", "2")
    await gpus.lock(job.process, LOCK_S)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_NOT_SUPPORTED") as refusal:
        await gpus.checkpoint(job.process, MEMORY_S)
    assert "managed memory" in refusal.value.advice
    assert await gpus.state(job.process) is State.LOCKED
    await gpus.unlock(job.process, LOCK_S)
    job.wait_for_steps(2)


@pytest.mark.parametrize("side", ["old", "new"])
async def test_an_unknown_gpu_leaves_it_checkpointed(gpus: Gpus, start: Start, side: str) -> None:
    job = start(*SMALL)
    known = await pairs_of(gpus)
    wrong = Pair(STRANGE, known[0].new_uuid) if side == "old" else Pair(known[0].old_uuid, STRANGE)
    await check_point(gpus, job.process)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_INVALID_VALUE"):
        await gpus.restore(job.process, [wrong, *known[1:]], MEMORY_S)
    assert await gpus.state(job.process) is State.CHECKPOINTED
    await go_on(gpus, job.process)
    job.wait_for_steps(2)


async def test_a_full_gpu_leaves_it_checkpointed(gpus: Gpus, driver: Driver, start: Start) -> None:
    job = start("--mib", "64")
    await check_point(gpus, job.process)
    await holders(gpus)  # the numbers below are fresh
    start(*driver.filling((await gpus.inventory()).gpus[0].memory_free_bytes), "--pace-s", "600", ready="READY")
    with pytest.raises(GpuFailed, match=r"not enough free device memory.*CUDA_ERROR_OUT_OF_MEMORY"):
        await gpus.restore(job.process, await pairs_of(gpus), MEMORY_S)
    assert await gpus.state(job.process) is State.CHECKPOINTED


# ---------------------------------------------------------------- who does not answer


async def test_a_stopped_process_answers_later_and_others_meanwhile(gpus: Gpus, start: Start) -> None:
    """The lock that was given up may land when the process goes on, or not: whoever undoes has to ask."""
    job, other = start(*SMALL, "--steps", "100000"), start(*SMALL, "--steps", "100000")
    os.kill(job.pid, signal.SIGSTOP)
    with pytest.raises(Timeout, match="stopped"):
        await gpus.state(job.process, 0.5)
    with pytest.raises(Timeout, match="stopped"):
        await gpus.lock(job.process, 0.5)
    await check_point(gpus, other.process)
    await go_on(gpus, other.process)
    os.kill(job.pid, signal.SIGCONT)
    assert await gpus.state(job.process, 10) in {State.RUNNING, State.LOCKED}
    await gpus.unlock(job.process, LOCK_S)
    job.wait_for_steps(2)


@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
async def test_what_was_given_up_is_finished_by_the_process(
    gpus: Gpus, driver: Driver, start: Start, verb: str
) -> None:
    """Given up by killing the helper in the middle, as a time-out does: the state says what came of it, and undo works."""
    job = start("--mib", "256")
    if driver.fake:
        driver.fake.fault(verb, "slow:500")
    await gpus.lock(job.process, LOCK_S)
    if verb == "restore":
        await gpus.checkpoint(job.process, MEMORY_S)
    asked = {"checkpoint": gpus.checkpoint(job.process, 0.15), "restore": gpus.restore(job.process, [], 0.15)}
    given_up = asked.pop(verb)
    for rest in asked.values():
        rest.close()
    try:
        await given_up
    except Timeout as error:
        assert "did not answer" in error.message  # noqa: PT017 - a fast driver is done in time, which is as good
    assert await gpus.state(job.process, MEMORY_S) is (State.CHECKPOINTED if verb == "checkpoint" else State.LOCKED)
    await go_on(gpus, job.process)
    job.wait_for_steps(2)
