"""Lock, checkpoint, restore, unlock: their effect, idempotence and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed, RankGone, Timeout
from snapshotd.cuda.driver import Gpus, Pair, State
from snapshotd.proc.tree import Process
from tests.cuda.processes import CudaProgram, helpers
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as some_gpus


def same(node: GpuNode) -> list[Pair]:
    return [Pair(gpu.uuid, gpu.uuid) for gpu in node.gpus]


async def test_verbs_lead_through_all_states_and_back(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    process = program.tell("allocate", 16).process
    assert await gpus.state(process) is State.RUNNING
    await gpus.lock(process, 5)
    assert await gpus.state(process) is State.LOCKED
    await gpus.checkpoint(process, 10)
    assert await gpus.state(process) is State.CHECKPOINTED
    await gpus.restore(process, same(node), 10)
    assert await gpus.state(process) is State.LOCKED
    await gpus.unlock(process, 5)
    assert await gpus.state(process) is State.RUNNING
    program.tell("allocate", 16)
    assert len(helpers()) == 1


async def test_every_verb_is_idempotent(gpus: Gpus, program: CudaProgram) -> None:
    process = program.process
    for _ in range(2):
        await gpus.unlock(process, 5)  # already running
        await gpus.restore(process, [], 10)
        for _ in range(2):
            await gpus.lock(process, 5)
        for _ in range(2):
            await gpus.checkpoint(process, 10)
        await gpus.lock(process, 5)  # was locked before it was checkpointed
        assert await gpus.state(process) is State.CHECKPOINTED
        for _ in range(2):
            await gpus.restore(process, [], 10)
        assert await gpus.state(process) is State.LOCKED


async def test_process_is_restored_onto_another_gpu(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    process = program.tell("allocate", 100).process
    await gpus.lock(process, 5)
    await gpus.checkpoint(process, 10)
    first, second = (gpu.uuid for gpu in node.gpus)
    await gpus.restore(process, [Pair(first, second), Pair(second, first)], 10)
    await gpus.unlock(process, 5)
    found = {gpu.uuid: [each.pid for each in gpu.processes] for gpu in (await gpus.inventory()).gpus}
    assert found == {first: [], second: [process.pid]}


async def test_wrong_state_is_named(gpus: Gpus, program: CudaProgram) -> None:
    process = program.process
    with pytest.raises(GpuFailed, match=r"checkpoint of process \d+ \(.*\) failed: CUDA_ERROR_ILLEGAL_STATE") as got:
        await gpus.checkpoint(process, 10)
    assert "(it is running, not locked)" in got.value.message
    await gpus.lock(process, 5)
    await gpus.checkpoint(process, 10)
    with pytest.raises(GpuFailed, match=r"\(it is checkpointed, not locked\)"):
        await gpus.unlock(process, 5)


async def test_process_without_cuda_has_no_state_and_cannot_be_locked(gpus: Gpus, sleeper: Process) -> None:
    assert await gpus.state(sleeper) is None
    with pytest.raises(GpuFailed, match=r"process \d+ \(sleep\) does not use CUDA: there is nothing to lock"):
        await gpus.lock(sleeper, 5)


async def test_process_that_is_gone_or_replaced_is_reported_as_gone(gpus: Gpus, program: CudaProgram) -> None:
    process = program.process
    another = Process(process.pid, process.start_ticks + 1)  # a reused pid
    assert await gpus.state(another) is None
    with pytest.raises(RankGone, match=f"process {process.pid} is gone"):
        await gpus.lock(another, 5)
    assert await gpus.state(process) is State.RUNNING  # it was not locked
    program.end()
    assert await gpus.state(process) is None
    with pytest.raises(RankGone):
        await gpus.unlock(process, 5)


async def test_process_killed_during_a_call_is_reported_as_gone(
    gpus: Gpus, node: GpuNode, program: CudaProgram
) -> None:
    await gpus.lock(program.process, 5)
    node.fault("checkpoint", "kill")
    with pytest.raises(RankGone):
        await gpus.checkpoint(program.process, 10)


async def test_busy_gpu_times_out(gpus: Gpus, program: CudaProgram) -> None:
    process = program.tell("spin", 600).process
    with pytest.raises(Timeout, match=r"the GPU work of process \d+ \(.*\) did not finish in 0\.2 s") as got:
        await gpus.lock(process, 0.2)
    assert "collective" in got.value.advice
    assert await gpus.state(process) is State.RUNNING
    assert len(helpers()) == 1  # the driver answered, so the helper was not killed


async def test_managed_memory_is_refused(gpus: Gpus, program: CudaProgram) -> None:
    process = program.tell("allocate_managed", 1).process
    await gpus.lock(process, 5)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_NOT_SUPPORTED") as got:
        await gpus.checkpoint(process, 10)
    assert "managed memory" in got.value.advice
    assert "imported" in got.value.advice
    assert await gpus.state(process) is State.LOCKED
    await gpus.unlock(process, 5)
    program.tell("allocate", 1)


async def test_restore_without_free_memory_is_refused(gpus: Gpus, start: Callable[[], CudaProgram]) -> None:
    moved, hog = start().tell("allocate", 256), start()
    await gpus.lock(moved.process, 5)
    await gpus.checkpoint(moved.process, 10)
    hog.tell("allocate", 704)
    with pytest.raises(
        GpuFailed, match=r"not enough free device memory on GPU 0 \(NVIDIA H200, 0\.2 GiB free\)"
    ) as got:
        await gpus.restore(moved.process, [], 10)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in got.value.message
    assert "--gpu" in got.value.advice
    assert await gpus.state(moved.process) is State.CHECKPOINTED
    hog.end()
    await gpus.restore(moved.process, [], 10)
    await gpus.unlock(moved.process, 5)


async def test_restore_onto_a_missing_gpu_is_refused(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    process = program.process
    await gpus.lock(process, 5)
    await gpus.checkpoint(process, 10)
    other = some_gpus("node-7")[0].uuid
    with pytest.raises(GpuFailed, match="CUDA_ERROR_INVALID_VALUE") as got:
        await gpus.restore(process, [Pair(node.gpus[0].uuid, other), Pair(node.gpus[1].uuid, node.gpus[0].uuid)], 10)
    assert "does not know one of the given GPUs" in got.value.advice
    assert await gpus.state(process) is State.CHECKPOINTED
    with pytest.raises(GpuFailed, match="ValueError: badly formed"):
        await gpus.restore(process, [Pair("GPU-0", "GPU-1")], 10)


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
async def test_lost_state_is_reported(gpus: Gpus, node: GpuNode, program: CudaProgram, verb: str) -> None:
    process = program.process
    verbs: dict[str, Callable[[], Awaitable[None]]] = {
        "lock": lambda: gpus.lock(process, 5),
        "checkpoint": lambda: gpus.checkpoint(process, 10),
        "restore": lambda: gpus.restore(process, [], 10),
        "unlock": lambda: gpus.unlock(process, 5),
    }
    for name, do in verbs.items():
        if name == verb:
            break
        await do()
    node.fault(verb, "lose")
    for _ in range(2):  # the state stays lost
        with pytest.raises(GpuFailed, match=f"the driver lost the process's device state: {verb} of process") as got:
            await verbs[verb]()
        assert "restart the job" in got.value.advice
    assert await gpus.state(process) is State.FAILED


async def test_unreadable_state_is_reported(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    node.fault("state", "fail:CUDA_ERROR_OPERATING_SYSTEM", once=False)
    with pytest.raises(GpuFailed, match=r"the CUDA state of .* cannot be read: CUDA_ERROR_OPERATING_SYSTEM"):
        await gpus.state(program.process)
    node.fault("lock", "fail:CUDA_ERROR_ILLEGAL_STATE")
    with pytest.raises(GpuFailed, match=r"lock of process \d+ \(.*\) failed: CUDA_ERROR_ILLEGAL_STATE$"):
        await gpus.lock(program.process, 5)


class TestDrivers:
    """Capabilities are detected by symbol."""

    @pytest.fixture
    def node(self, tmp_path: Path, request: pytest.FixtureRequest) -> GpuNode:
        version = request.param
        return GpuNode(tmp_path / "node", some_gpus("node-1", 2), driver_version=version, checkpoints=version >= "570")

    @pytest.mark.parametrize("node", ["570.86.10"], indirect=True)
    async def test_r570_restores_where_it_was(self, gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
        process = program.process
        await gpus.lock(process, 5)
        await gpus.checkpoint(process, 10)
        first, second = (gpu.uuid for gpu in node.gpus)
        with pytest.raises(GpuFailed, match="onto another GPU: it is older than r580"):
            await gpus.restore(process, [Pair(first, second), Pair(second, first)], 10)
        await gpus.restore(process, same(node), 10)
        assert await gpus.state(process) is State.LOCKED

    @pytest.mark.parametrize("node", ["550.54.15"], indirect=True)
    async def test_r550_cannot_checkpoint(self, gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
        with pytest.raises(GpuFailed, match="has no cuCheckpointProcessGetState: it is older than r570"):
            await gpus.state(program.process)
        assert [gpu.uuid for gpu in (await gpus.inventory()).gpus] == [gpu.uuid for gpu in node.gpus]
