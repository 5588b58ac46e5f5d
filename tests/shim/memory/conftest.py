"""Fixtures: jobs with device memory on the stand-in for CUDA, with the library preloaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.fakes.cuda_fake import GpuNode, gpus
from tests.shim.jobs import compile_c
from tests.shim.memory.jobs import PROGRAMS, DeviceJob

Start = Callable[..., DeviceJob]
Room = Callable[[], int]


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", gpus("node", count=2, memory_mib=1024), context_mib=8)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    built = GpuNode(folder / "node", gpus("build")).folder
    libraries = (str(built / "libcudart.so.13"), str(built / "libcuda.so.1"))
    lacking = compile_c(PROGRAMS / "lacking.c", folder / "liblacking.so", "-shared", "-fPIC")
    linked = ("-Wl,--no-as-needed", str(lacking), f"-Wl,-rpath,{folder}")
    return compile_c(PROGRAMS / "job.c", folder / "job", "-pthread", *linked, *libraries)


@pytest.fixture
def libraries(library: Path, offload_library: Path, shared_library: Path) -> Mapping[str, Path]:
    """By the choice of `migrator run --device-memory`."""
    return {"driver": library, "offload": offload_library, "shared": shared_library}


@pytest.fixture
def usual_library() -> str:
    """With which jobs are started that name none."""
    return "offload"


@pytest.fixture
def start_job(
    libraries: Mapping[str, Path], usual_library: str, program: Path, node: GpuNode, tmp_path: Path
) -> Iterator[Start]:
    """Starts jobs; those that are left at the end are killed."""
    started: list[DeviceJob] = []

    def start(*commands: str, device_memory: str = usual_library) -> DeviceJob:
        environment = {**os.environ, **node.environment}
        preload = libraries[device_memory]
        job = DeviceJob(preload, program, env=environment, folder=tmp_path / f"stripes-{len(started)}")
        started.append(job)
        for line in ("begin", *commands):
            assert job.do(line) == "done"
        return job

    yield start
    for job in started:
        job.end()


@pytest.fixture
def room(program: Path, node: GpuNode) -> Room:
    """The free bytes of GPU 0, as another process sees them."""

    def room() -> int:
        environment: dict[str, str] = {**os.environ, **node.environment}
        command: Sequence[str | Path] = [program]
        done = subprocess.run(command, input="room\n", env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    return room
