"""Preflight with a report of the fake driver, for a process that uses it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda.driver import Gpus
from snapshotd.cuda.pairing import choose
from snapshotd.preflight import DriverReport, inspect_rank, uses_cuda
from snapshotd.proc.tree import Process
from tests.cuda.processes import CudaProgram
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as some_gpus

MIB = 1 << 20

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="preflight looks at other users' processes, as root")


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", some_gpus("node-1", 2, memory_mib=1024))


@pytest.fixture
def program(node: GpuNode) -> Iterator[CudaProgram]:
    program = CudaProgram(node)
    yield program
    program.end()


@pytest.fixture
async def gpus(node: GpuNode) -> AsyncIterator[Gpus]:
    gpus = Gpus(node.library_dir)
    yield gpus
    await gpus.close()


async def driver_report(gpus: Gpus, pids: list[int]) -> DriverReport | None:
    held = [pid for pid in uses_cuda(pids) if await gpus.state(Process.of(pid)) is not None]
    result = await gpus.inventory()
    return DriverReport(result.driver_version, tuple(result.gpus), tuple(held), result.problem) if held else None


def facts_of(pid: int, gpu: DriverReport) -> pb.GpuFacts:
    facts, checks = inspect_rank(
        [pid],
        pid,
        rank=pb.Rank(),
        node="node-1",
        daemon_version="0.1.0",
        criu_version="4.2.1",
        carry_paths=["/tmp"],
        keeper_pid=os.getpid(),
        keeper_is_guest=False,
        gpu=gpu,
    )
    wrong = [check.name for check in checks if check.name.startswith("gpu-") and check.verdict != pb.Check.PASS]
    assert wrong == ["gpu-parking"]  # the shim is not preloaded here
    return facts.gpu


async def test_driver_report_leads_to_gpu_pairs(gpus: Gpus, program: CudaProgram, tmp_path: Path) -> None:
    pid = program.process.pid
    program.tell("init")
    program.tell("allocate", 100)
    seen = await driver_report(gpus, [os.getpid(), pid])
    assert seen is not None
    assert seen.cuda_pids == (pid,)
    result = facts_of(pid, seen)
    assert [use.uuid for use in result.uses] == [seen.gpus[0].uuid]
    assert result.device_bytes >= 100 * MIB
    assert [pair.new_uuid for pair in choose(result, seen.gpus, "")[0]] == [gpu.uuid for gpu in seen.gpus]
    other = Gpus(GpuNode(tmp_path / "other", some_gpus("node-2", 2, memory_mib=1024)).library_dir)
    try:
        there = (await other.inventory()).gpus
    finally:
        await other.close()
    assert [pair.new_uuid for pair in choose(result, there, "1")[0]] == [there[1].uuid, there[0].uuid]


async def test_process_without_cuda_needs_no_report(gpus: Gpus) -> None:
    assert await driver_report(gpus, [os.getpid()]) is None
