"""What the product expects of a CUDA driver, tested through its own client on the fake and on the real driver.

The real one is skipped on a machine without a GPU; `integration/gpu/run tests/contract` runs it on one
with. The output of every job that continues must be byte-identical to that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.proc.tree import Process, find_child
from tests.contract.cuda_driver import (
    LOCK_S,
    MEMORY_S,
    MIB,
    SMALL,
    STRANGE,
    Driver,
    Start,
    check_point,
    go_on,
    holders,
    pairs_of,
)
from tests.descriptors import open_links

# ---------------------------------------------------------------- processes without a state


async def test_process_without_cuda_has_no_state(gpus: Gpus) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = Process.of(sleeper.pid)
        assert await gpus.state(process) is None
        with pytest.raises(GpuFailed, match="does not use CUDA"):
            await gpus.lock(process, LOCK_S)
        sleeper.kill()
    assert await gpus.state(process) is None


async def test_process_that_only_loaded_the_library_has_no_state(gpus: Gpus, driver: Driver) -> None:
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


async def test_forked_child_has_no_state(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--children", "1")
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    assert await gpus.state(Process.of(child)) is None
    assert await gpus.state(job.process) is State.RUNNING


# ---------------------------------------------------------------- checkpoint and restore


async def test_output_is_that_of_an_undisturbed_run(gpus: Gpus, start: Start) -> None:
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


async def test_locked_job_makes_no_step(gpus: Gpus, start: Start) -> None:
    job = start("--mib", "1", "--blocks", "1", "--pace-s", "0", "--steps", "1000000")
    await gpus.lock(job.process, LOCK_S)
    await asyncio.sleep(0.2)  # a line may be in the middle of being printed
    before = job.steps()
    await asyncio.sleep(0.5)
    assert job.steps() == before
    await gpus.unlock(job.process, LOCK_S)
    job.wait_for_steps(3)


async def test_checkpointed_process_holds_nothing_of_the_gpu(gpus: Gpus, start: Start) -> None:
    """No device file is open or mapped, and NVML does not list the process, so CRIU can dump it."""
    job = start("--mib", "64")
    assert job.pid in await holders(gpus)
    await check_point(gpus, job.process)
    assert "/dev/nvidia" not in Path(f"/proc/{job.pid}/maps").read_text()
    assert not [name for name in open_links(job.pid).values() if name.startswith("/dev/nvidia")]
    assert job.pid not in await holders(gpus)
    await go_on(gpus, job.process)
    assert (await holders(gpus))[job.pid] >= 64 * MIB


async def test_inventory_names_the_gpus(gpus: Gpus) -> None:
    inventory = await gpus.inventory()
    assert re.fullmatch(r"\d{3}\.[\d.]+", inventory.driver_version)
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))
    for gpu in inventory.gpus:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid)
        assert gpu.name
        assert 0 < gpu.memory_free_bytes <= gpu.memory_bytes


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs root")
async def test_process_in_another_pid_namespace_is_checkpointed(gpus: Gpus, driver: Driver) -> None:
    """The client uses its pid in the outer namespace."""
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


# ---------------------------------------------------------------- refusals, and the state afterwards


async def test_verb_in_the_wrong_state_changes_nothing(gpus: Gpus, start: Start) -> None:
    process = start(*SMALL).process
    with pytest.raises(GpuFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
        await gpus.checkpoint(process, MEMORY_S)
    assert await gpus.state(process) is State.RUNNING
    await check_point(gpus, process)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
        await gpus.unlock(process, LOCK_S)
    assert await gpus.state(process) is State.CHECKPOINTED


async def test_busy_gpu_is_locked_when_its_work_is_done(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--busy-ms", "4000", ready="busy 0")
    with pytest.raises(Timeout, match=r"did not finish in 0\.3 s"):
        await gpus.lock(job.process, 0.3)
    assert await gpus.state(job.process) is State.RUNNING
    await gpus.lock(job.process, LOCK_S)
    assert await gpus.state(job.process) is State.LOCKED


async def test_managed_memory_is_refused_and_the_job_continues(gpus: Gpus, start: Start) -> None:
    job = start(*SMALL, "--managed-mib", "2")
    await gpus.lock(job.process, LOCK_S)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_NOT_SUPPORTED") as refusal:
        await gpus.checkpoint(job.process, MEMORY_S)
    assert "managed memory" in refusal.value.advice
    assert await gpus.state(job.process) is State.LOCKED
    await gpus.unlock(job.process, LOCK_S)
    job.wait_for_steps(2)


@pytest.mark.parametrize("side", ["old", "new"])
async def test_restore_onto_an_unknown_gpu_leaves_the_process_checkpointed(gpus: Gpus, start: Start, side: str) -> None:
    job = start(*SMALL)
    known = await pairs_of(gpus)
    wrong = Pair(STRANGE, known[0].new_uuid) if side == "old" else Pair(known[0].old_uuid, STRANGE)
    await check_point(gpus, job.process)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_INVALID_VALUE"):
        await gpus.restore(job.process, [wrong, *known[1:]], MEMORY_S)
    assert await gpus.state(job.process) is State.CHECKPOINTED
    await go_on(gpus, job.process)
    job.wait_for_steps(2)


async def test_restore_onto_a_full_gpu_leaves_the_process_checkpointed(
    gpus: Gpus, driver: Driver, start: Start
) -> None:
    job = start("--mib", "64")
    await check_point(gpus, job.process)
    await holders(gpus)  # so that the inventory below is current
    start(*driver.filling((await gpus.inventory()).gpus[0].memory_free_bytes), "--pace-s", "600", ready="READY")
    with pytest.raises(GpuFailed, match=r"not enough free device memory.*CUDA_ERROR_OUT_OF_MEMORY"):
        await gpus.restore(job.process, await pairs_of(gpus), MEMORY_S)
    assert await gpus.state(job.process) is State.CHECKPOINTED


# ---------------------------------------------------------------- processes that do not answer


async def test_stopped_process_answers_later_and_others_meanwhile(gpus: Gpus, start: Start) -> None:
    """The lock that timed out may take effect when the process continues, or not, so an undo must query the state."""
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
async def test_call_that_timed_out_is_finished_by_the_process(
    gpus: Gpus, driver: Driver, start: Start, verb: str
) -> None:
    """The time-out kills the helper in the middle of the call. The state shows the result, and undo works."""
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
        assert "did not answer" in error.message  # noqa: PT017 - a fast driver may finish in time
    assert await gpus.state(job.process, MEMORY_S) is (State.CHECKPOINTED if verb == "checkpoint" else State.LOCKED)
    await go_on(gpus, job.process)
    job.wait_for_steps(2)
