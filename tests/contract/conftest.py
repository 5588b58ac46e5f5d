"""Runs every test of this folder on the fake driver, and on the real one where there is a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from snapshotd.cuda.driver import Gpus
from tests.contract.cuda_driver import Driver, Start
from tests.fakes.cuda_fake import GpuNode
from tests.fakes.cuda_fake import gpus as fake_gpus
from tests.fakes.device_job import DeviceJob


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
