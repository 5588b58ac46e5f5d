from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.cuda_fake import GpuNode, gpus
from tests.fakes.device_job import DeviceJob


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node-1", gpus("node-1", 2))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DeviceJob]]:
    jobs: list[DeviceJob] = []

    def begin(node: GpuNode, *options: str, ready: str = "step 1 ", **environment: str) -> DeviceJob:
        # Without an end: a busy machine would outrun any number of steps. See DeviceJob.end_soon.
        output = tmp_path / f"output-{len(jobs)}"
        endless = () if "--steps" in options else ("--end-file", f"{output}.end")
        jobs.append(DeviceJob(output, {**node.environment, **environment}, *options, *endless))
        jobs[-1].wait_for(ready)
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()
