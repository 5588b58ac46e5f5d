"""The inventory of GPUs from NVML, also on a node without GPUs or with broken ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from migrator.fan_out import ASK_TIMEOUT_S
from snapshotd import service
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed
from snapshotd.cuda import inventory, library, nvml
from snapshotd.cuda.driver import Gpus, State
from snapshotd.cuda.inventory import Inventory, from_answer
from snapshotd.proc.tree import Process
from tests.cuda.processes import CudaProgram, helpers, wait_until
from tests.fakes.cuda_fake import GpuNode

MIB = 1 << 20


@pytest.fixture
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "KEPT_S", 0.0)
    monkeypatch.setattr(inventory, "FAILURE_KEPT_S", 0.0)


async def test_gpus_are_listed(gpus: Gpus, node: GpuNode, start: Callable[[], CudaProgram]) -> None:
    one, other = start().tell("allocate", 100), start()
    found = await gpus.inventory()
    assert (found.driver_version, found.problem) == ("580.159.04", "")
    used = [(one.process.pid, (100 + 64) * MIB), (other.process.pid, 64 * MIB)]
    assert found.gpus == [
        pb.Gpu(
            uuid=node.gpus[0].uuid,
            index=0,
            name="NVIDIA H200",
            compute_capability="9.0",
            memory_bytes=1024 * MIB,
            memory_free_bytes=(1024 - 100 - 64 - 64) * MIB,
            processes=[pb.GpuProcess(pid=pid, memory_bytes=size) for pid, size in sorted(used)],
            bus_id="0000:10:00.0",
        ),
        pb.Gpu(
            uuid=node.gpus[1].uuid,
            index=1,
            name="NVIDIA H200",
            compute_capability="9.0",
            memory_bytes=1024 * MIB,
            memory_free_bytes=1024 * MIB,
            bus_id="0000:11:00.0",
        ),
    ]


@pytest.mark.usefixtures("always_fresh")
async def test_mig_and_mps_are_reported(gpus: Gpus, node: GpuNode, program: CudaProgram) -> None:
    first, second = node.gpus
    node.gpus = [dataclasses.replace(first, mps=True), dataclasses.replace(second, mig=True)]
    node.write()
    found = (await gpus.inventory()).gpus
    assert [(each.pid, each.mps) for each in found[0].processes] == [(program.process.pid, True)]
    assert [gpu.mig for gpu in found] == [False, True]
    node.gpus = [dataclasses.replace(first, mig=None), second]  # a chip without MIG
    node.write()
    assert [gpu.mig for gpu in (await gpus.inventory()).gpus] == [False, False]


async def test_inventory_is_kept_for_a_moment_and_copied(
    gpus: Gpus, node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "KEPT_S", 3600.0)
    first = await gpus.inventory()
    first.gpus[0].reserved_for = "a move"
    first.gpus.pop()
    node.gpus = node.gpus[:1]
    node.write()
    second = await gpus.inventory()
    assert [gpu.reserved_for for gpu in second.gpus] == ["", ""]
    monkeypatch.setattr(gpus._inventory, "_seen_until", 0.0)
    assert len((await gpus.inventory()).gpus) == 1


@pytest.mark.usefixtures("always_fresh")
class TestFailures:
    async def test_hanging_nvml_is_reported(
        self, gpus: Gpus, node: GpuNode, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await gpus.inventory()
        monkeypatch.setattr(inventory, "WAIT_S", 0.5)
        monkeypatch.setattr(inventory, "QUERY_S", 5.0)
        node.fault("nvml", "hang")
        found = await gpus.inventory()
        assert found.problem.startswith("NVML did not answer within 0.5 s")
        assert (found.driver_version, found.gpus) == ("580.159.04", [])
        (helper,) = helpers()
        assert await gpus.state(program.process) is State.RUNNING
        assert (await gpus.inventory()) == found  # no second wait for the same query
        monkeypatch.setattr(inventory, "WAIT_S", 60)
        assert (await gpus.inventory()).problem.startswith("NVML did not answer within 5 s")
        wait_until(lambda: helper not in helpers())
        assert len((await gpus.inventory()).gpus) == 2

    async def test_caller_can_wait_for_a_shorter_time(self, gpus: Gpus, node: GpuNode) -> None:
        """The description of a node has its addresses too: other nodes would take one that is late for one that is down."""
        node.fault("nvml", "hang")
        assert (await gpus.inventory(at_most_s=0.01)).problem.startswith("NVML did not answer within 0.01 s")
        assert service.GLANCE_S < ASK_TIMEOUT_S / 2

    async def test_long_query_is_not_restarted(
        self, gpus: Gpus, node: GpuNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inventory, "WAIT_S", 0.0)
        assert (await gpus.inventory()).problem
        while not (found := await gpus.inventory()).gpus:
            assert found.problem.startswith("NVML did not answer within 0 s")
            await asyncio.sleep(0.001)  # if each call restarted the query, it would never end
        assert len(found.gpus) == 2

    async def test_close_during_a_query_ends_it_with_a_reason(
        self, gpus: Gpus, node: GpuNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.fault("nvml", "hang")
        asked = asyncio.create_task(gpus.inventory())
        await asyncio.to_thread(wait_until, lambda: not node.faults())
        await gpus.close()
        assert (await asked).problem == "the daemon is exiting"

    async def test_crashing_nvml_is_reported(self, gpus: Gpus, node: GpuNode) -> None:
        node.fault("nvml", "die")
        assert len((await gpus.inventory()).gpus) == 2  # queried again
        node.fault("nvml", "die", once=False)
        assert (await gpus.inventory()).problem == "the GPU helper exited with SIGKILL"

    async def test_failing_nvml_is_reported(self, gpus: Gpus, node: GpuNode) -> None:
        node.fault("nvml", "fail:999", once=False)
        assert (await gpus.inventory()) == Inventory(problem="NVML: Unknown Error")
        node.clear_faults()
        assert len((await gpus.inventory()).gpus) == 2

    async def test_failure_is_kept_for_a_while(
        self, gpus: Gpus, node: GpuNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inventory, "FAILURE_KEPT_S", 3600.0)
        node.fault("nvml", "fail:999")
        for _ in range(2):
            assert (await gpus.inventory()).problem == "NVML: Unknown Error"


class TestNoGpu:
    async def test_node_without_libraries_has_no_gpu(
        self, tmp_path: Path, sleeper: Process, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(library, "found", lambda name, library_dir: False)
        monkeypatch.setattr(library, "driver_loaded", lambda: False)
        gpus = Gpus(str(tmp_path))
        assert not gpus.available
        assert await gpus.inventory() == Inventory()
        assert await gpus.state(sleeper) is None
        wait_until(lambda: library.holds_cuda(program.process.pid))  # its threads name themselves
        with pytest.raises(GpuFailed, match=r"uses CUDA, but .*: libcuda\.so\.1 does not exist"):
            await gpus.state(program.process)
        assert helpers() == []
        monkeypatch.setattr(library, "driver_loaded", lambda: True)
        assert "gpu_library_dir" in (await gpus.inventory()).problem

    async def test_node_with_libraries_but_no_gpu_keeps_no_helper(
        self, gpus: Gpus, node: GpuNode, sleeper: Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.gpus = []
        node.write()
        assert await gpus.inventory() == Inventory("580.159.04")
        await asyncio.to_thread(wait_until, lambda: helpers() == [])  # a helper without GPUs exits
        assert await gpus.state(sleeper) is None
        await asyncio.to_thread(wait_until, lambda: helpers() == [])
        monkeypatch.setattr(sys, "executable", "/nowhere")  # the result is kept: no helper is started now
        assert (gpus.available, await gpus.state(sleeper)) == (False, None)

    async def test_state_of_a_process_that_lost_its_gpu_is_an_error(
        self, gpus: Gpus, node: GpuNode, program: CudaProgram
    ) -> None:
        """ "It does not use CUDA" would let a locked process continue as if nothing had happened."""
        wait_until(lambda: library.holds_cuda(program.process.pid))  # its threads name themselves
        await gpus.lock(program.process, 5)
        (helper,) = helpers()
        os.kill(helper, signal.SIGKILL)
        node.gpus = []
        node.write()
        for _ in range(2):
            with pytest.raises(GpuFailed, match=r"uses CUDA, but the driver cannot be used: .*CUDA_ERROR_NO_DEVICE"):
                await gpus.state(program.process)

    async def test_node_with_libraries_but_no_driver_has_no_gpu(self, gpus: Gpus, node: GpuNode) -> None:
        node.fault("nvml", "fail:9")
        assert await gpus.inventory() == Inventory()


def test_libraries_are_found_where_the_loader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    name = "libsnapshot-test.so.1"
    assert not library.found(name, str(tmp_path))
    (tmp_path / name).touch()
    assert library.found(name, str(tmp_path))
    assert not library.found(name, "")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert library.found(name, "")
    assert library.found("libc.so.6", "")
    assert not library.found("libc.so", "")  # a part of a name does not match


class Nvml:
    """Two GPUs, one of which can fail; those of the fake driver cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: dict[str, Exception] = {}
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": b"580.1",
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=10, free=7),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetName": b"GPU",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
            "nvmlDeviceGetMPSComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=5)],
        }
        for name, value in answers.items():
            monkeypatch.setattr(pynvml, name, self._answering(name, value))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(nvml, "_initialised", False)

    def _answering(self, name: str, value: Any) -> Callable[..., Any]:
        def answer(handle: int = 1) -> Any:
            if handle == 1 and name in self.failing:
                raise self.failing[name]
            return value

        return answer


class TestOneGpuOfTwo:
    def test_lost_gpu_does_not_hide_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = Nvml(monkeypatch)
        fake.failing["nvmlDeviceGetMemoryInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        found = from_answer(json.loads(json.dumps(nvml.inventory())))
        assert [(gpu.index, gpu.bus_id) for gpu in found.gpus] == [(0, "0000:1b:00.0")]
        assert found.problem == "GPU 1: GPU is lost"

    def test_old_gpu_lacks_some_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = Nvml(monkeypatch)
        for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMPSComputeRunningProcesses"):
            fake.failing[name] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        first, second = from_answer(nvml.inventory()).gpus
        assert list(first.processes) == [pb.GpuProcess(pid=7, memory_bytes=5, mps=True)]  # once, though in both lists
        assert list(second.processes) == [pb.GpuProcess(pid=7)]
        assert first.persistence
        assert not second.HasField("persistence")
        assert not second.mig
