"""What the product expects of a CUDA driver, tested through its own client on the fake and on the real driver.

The real one is skipped on a machine without a GPU; `integration/gpu/run tests/contract/test_cuda.py` runs it on one
with. The output of every job that continues must be byte-identical to that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.proc.tree import Process, find_child
from tests.contract.mapped_memory import CudaError, MappedMemory
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
    """The fake or the real driver: its environment, and how to fill its GPU."""

    environment: dict[str, str]
    gpus: Gpus
    fake: GpuNode | None

    def filling(self, free_bytes: int) -> tuple[str, ...]:
        """Options of a job that leaves no room for another context: 20 MiB on the fake, several hundred on a real GPU."""
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
    """Maps each GPU of the node to itself."""
    return [Pair(gpu.uuid, gpu.uuid) for gpu in (await gpus.inventory()).gpus]


async def check_point(gpus: Gpus, process: Process) -> None:
    await gpus.lock(process, LOCK_S)
    await gpus.checkpoint(process, MEMORY_S)


async def go_on(gpus: Gpus, process: Process) -> None:
    await gpus.restore(process, await pairs_of(gpus), MEMORY_S)
    await gpus.unlock(process, LOCK_S)


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
    open_files = [os.readlink(entry) for entry in Path(f"/proc/{job.pid}/fd").iterdir()]
    assert not [name for name in open_files if name.startswith("/dev/nvidia")]
    assert job.pid not in await holders(gpus)
    await go_on(gpus, job.process)
    assert (await holders(gpus))[job.pid] >= 64 * MIB


async def holders(gpus: Gpus) -> dict[int, int]:
    """Current device memory by process. Waits, because the inventory may be a second old."""
    await asyncio.sleep(1.1)
    inventory = await gpus.inventory()
    assert not inventory.problem
    return {each.pid: each.memory_bytes for gpu in inventory.gpus for each in gpu.processes}


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


# ---------------------------------------------------------------- memory mapped by the program


LARGE = 16 * MIB
GRAIN = 2 * MIB


@pytest.fixture
def mapper(driver: Driver) -> Iterator[Callable[[], MappedMemory]]:
    made: list[MappedMemory] = []

    def begin() -> MappedMemory:
        made.append(MappedMemory(driver.environment))
        return made[-1]

    yield begin
    for each in made:
        each.end()


@pytest.fixture
def memory(mapper: Callable[[], MappedMemory]) -> MappedMemory:
    return mapper()


def expected(length: int, seed: int) -> str:
    return hashlib.sha256(random.Random(seed).randbytes(length)).hexdigest()


async def test_memory_is_allocated_in_multiples_of_the_granularity(memory: MappedMemory) -> None:
    grain = memory.ask("granularity")
    assert grain == GRAIN
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.ask("create", grain // 2)


async def test_released_memory_exists_until_it_is_unmapped(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    before = memory.ask("free_bytes")
    handle = memory.ask("create", LARGE)
    memory.ask("map", address, LARGE, handle)
    memory.ask("access", address, LARGE)
    memory.ask("release", handle)
    assert memory.ask("free_bytes") <= before - LARGE
    memory.ask("write", address, LARGE, 1)
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 1)
    held = memory.ask("free_bytes")
    memory.ask("unmap", address, LARGE)
    assert memory.ask("free_bytes") >= held + LARGE


async def test_unmapped_memory_exists_until_it_is_released(memory: MappedMemory) -> None:
    """Its contents are the same wherever it is mapped."""
    address = memory.ask("reserve", 2 * LARGE)
    handle = memory.ask("create", LARGE)
    for place in (address, address + LARGE):
        memory.ask("map", place, LARGE, handle)
        memory.ask("access", place, LARGE)
        if place == address:
            memory.ask("write", address, LARGE, 2)
        assert memory.ask("digest", place, LARGE) == expected(LARGE, 2)
        memory.ask("unmap", place, LARGE)
    held = memory.ask("free_bytes")
    memory.ask("release", handle)
    assert memory.ask("free_bytes") >= held + LARGE


async def test_retained_handle_keeps_memory(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    memory.ask("write", address, LARGE, 3)
    handle = memory.ask("retain", address)
    memory.ask("unmap", address, LARGE)
    memory.ask("map", address, LARGE, handle)
    memory.ask("access", address, LARGE)
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 3)


async def test_address_can_be_mapped_to_other_memory_after_unmap(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    for seed in (4, 5, 6):
        memory.ask("mapped", address, LARGE)
        assert memory.ask("digest", address, LARGE) != expected(LARGE, seed - 1)
        memory.ask("write", address, LARGE, seed)
        assert memory.ask("digest", address, LARGE) == expected(LARGE, seed)
        memory.ask("unmap", address, LARGE)


async def test_reservation_uses_no_memory(memory: MappedMemory) -> None:
    before = memory.ask("free_bytes")
    memory.ask("reserve", 1 << 40)
    assert memory.ask("free_bytes") >= before - GRAIN


async def test_mapped_address_cannot_be_mapped_again(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    other = memory.ask("create", LARGE)
    with pytest.raises(CudaError):
        memory.ask("map", address, LARGE, other)


async def test_memory_that_does_not_fit_is_refused_and_nothing_is_allocated(memory: MappedMemory) -> None:
    before = memory.ask("free_bytes")
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.ask("create", before // GRAIN * GRAIN + LARGE)
    assert memory.ask("free_bytes") >= before - GRAIN
    memory.ask("release", memory.ask("create", LARGE))


async def test_memory_calls_wait_while_locked(gpus: Gpus, memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    process = Process.of(memory.pid)
    await gpus.lock(process, LOCK_S)
    memory.begin("mapped", address, LARGE)
    assert not select.select([memory.output], [], [], 0.5)[0]
    await gpus.unlock(process, LOCK_S)
    memory.answer()
    memory.ask("write", address, LARGE, 7)


async def test_mapped_and_plain_memory_are_restored(gpus: Gpus, memory: MappedMemory) -> None:
    """With a hole between two mappings, and memory that is not mapped."""
    address = memory.ask("reserve", 3 * LARGE)
    for number in (0, 2):
        memory.ask("mapped", address + number * LARGE, LARGE)
        memory.ask("write", address + number * LARGE, LARGE, number)
    plain = memory.ask("plain", LARGE)
    memory.ask("write", plain, LARGE, 8)
    apart = memory.ask("create", LARGE)
    memory.ask("map", address + LARGE, LARGE, apart)
    memory.ask("access", address + LARGE, LARGE)
    memory.ask("write", address + LARGE, LARGE, 9)
    memory.ask("unmap", address + LARGE, LARGE)
    await check_point(gpus, Process.of(memory.pid))
    await go_on(gpus, Process.of(memory.pid))
    for number in (0, 2):
        assert memory.ask("digest", address + number * LARGE, LARGE) == expected(LARGE, number)
    assert memory.ask("digest", plain, LARGE) == expected(LARGE, 8)
    memory.ask("map", address + LARGE, LARGE, apart)
    memory.ask("access", address + LARGE, LARGE)
    assert memory.ask("digest", address + LARGE, LARGE) == expected(LARGE, 9)


async def test_reservation_without_memory_is_restored(gpus: Gpus, memory: MappedMemory) -> None:
    """A process with offloaded memory has only reserved addresses and a little plain memory. Checkpointed twice."""
    address = memory.ask("reserve", LARGE)
    plain = memory.ask("plain", GRAIN)
    memory.ask("write", plain, GRAIN, 10)
    for seed in (11, 12):
        memory.ask("mapped", address, LARGE)
        memory.ask("write", address, LARGE, seed)
        memory.ask("unmap", address, LARGE)
        await check_point(gpus, Process.of(memory.pid))
        await go_on(gpus, Process.of(memory.pid))
        memory.ask("mapped", address, LARGE)
        memory.ask("write", address, LARGE, seed + 10)
        assert memory.ask("digest", address, LARGE) == expected(LARGE, seed + 10)
        assert memory.ask("digest", plain, GRAIN) == expected(GRAIN, 10)
        memory.ask("unmap", address, LARGE)


async def test_pinned_memory_freed_before_a_checkpoint_does_not_prevent_it(gpus: Gpus, memory: MappedMemory) -> None:
    """The pinned staging buffers are allocated again after the restore."""
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    slots = [memory.ask("pin", 8 * MIB) for _ in range(4)]
    memory.ask("write", address, LARGE, 13)
    for slot in slots:
        memory.ask("unpin", slot)
    await check_point(gpus, Process.of(memory.pid))
    await go_on(gpus, Process.of(memory.pid))
    slots = [memory.ask("pin", 8 * MIB) for _ in range(4)]
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 13)
    for slot in slots:
        memory.ask("unpin", slot)


async def test_checkpoint_does_not_copy_unmapped_memory(gpus: Gpus, mapper: Callable[[], MappedMemory]) -> None:
    length = 4 * LARGE
    resident = []
    for parked in (False, True):
        memory = mapper()
        address = memory.ask("reserve", length)
        memory.ask("mapped", address, length)
        memory.ask("write", address, length, 14)
        if parked:
            memory.ask("unmap", address, length)
            held = (await holders(gpus)).get(memory.pid, 0)
            memory.ask("mapped", address, length)
            assert (await holders(gpus))[memory.pid] >= held + length
            memory.ask("unmap", address, length)
        await check_point(gpus, Process.of(memory.pid))
        assert memory.pid not in await holders(gpus)
        resident.append(_resident_bytes(memory.pid))
    assert resident[0] - resident[1] > length * 3 // 4


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024
