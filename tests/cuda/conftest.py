"""A node with simulated GPUs, processes that use them, and the daemon's Gpus."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.cuda.driver import Gpus
from snapshotd.proc.tree import Process
from tests.cuda.processes import CudaProgram, helpers
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as some_gpus


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", some_gpus("node-1", 2, memory_mib=1024))


@pytest.fixture
async def gpus(node: GpuNode) -> AsyncIterator[Gpus]:
    gpus = Gpus(node.library_dir)
    yield gpus
    await gpus.close()
    assert helpers() == []


@pytest.fixture
def start(node: GpuNode) -> Iterator[Callable[[], CudaProgram]]:
    """Starts a process that has a context on the first GPU."""
    started: list[CudaProgram] = []

    def one() -> CudaProgram:
        started.append(CudaProgram(node))
        return started[-1].tell("init")

    yield one
    for program in started:
        program.end()


@pytest.fixture
def program(start: Callable[[], CudaProgram]) -> CudaProgram:
    return start()


@pytest.fixture
def sleeper() -> Iterator[Process]:
    """A process that does not use CUDA."""
    child = subprocess.Popen(["sleep", "600"])
    yield Process.of(child.pid)
    child.kill()
    child.wait()
