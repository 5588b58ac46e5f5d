"""Device memory that is parked: ranks whose shim backs it move between nodes with stand-in GPUs, and are undone.

The real daemons, CRIU, shim, helper and stripes; only the driver is not real. The same on a real GPU is integration/gpu.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu_nodes import STEPS, GpuCluster
from integration.harness import Job, cluster, until
from snapshotd.faults import Point
from tests.fakes.cuda_fake import GpuNode, gpus

pytestmark = pytest.mark.timeout(180)

SOURCE, OTHER, TARGET = "node-1", "node-2", "spare-1"
UNDONE = 11
MIB = 1 << 20
#: 64 MiB on the device, all of which the shim can back.
LARGE = ("--mib", "64", "--blocks", "4", "--api", "runtime")
PARKED = ("--device-memory", "parked")


@pytest.fixture(scope="module")
def made() -> Iterator[GpuCluster]:
    folder = Path(__file__).parent / ".work" / "parked-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "parked") as nodes:
        yield GpuCluster(nodes, folder / "nodes")


@pytest.fixture
def lab(made: GpuCluster) -> Iterator[GpuCluster]:
    yield made
    made.reset()


def start(lab: GpuCluster, *arguments: str, steps: int = 60, pace_s: float = 0.05) -> Job:
    return lab.job(SOURCE, *arguments, steps=steps, pace_s=pace_s, options=PARKED)


def uninterrupted(folder: Path, *arguments: str, steps: int = 60) -> str:
    """What the job prints on a GPU of its own, without a move and without the shim."""
    alone = GpuNode(folder / "alone", gpus("alone"))
    command = [*STEPS, "--steps", str(steps), "--pace-s", "0", *arguments]
    done = subprocess.run(command, env={**os.environ, **alone.environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends_well(lab: GpuCluster, job: Job, folder: Path, *arguments: str, steps: int = 60) -> None:
    assert job.finish(90) == 0, f"{job.text()[-500:]}\n{lab.cluster.logs()}"
    assert job.text() == uninterrupted(folder, *arguments, steps=steps)
    until("nothing of it is left", lambda: not lab.cluster.leftovers(), 20)


def gpu_uses(lab: GpuCluster, node: str) -> list[int]:
    return [gpu["memory_bytes"] - gpu["memory_free_bytes"] for gpu in lab.shown(node)["gpus"]]


def part(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = [each for each in told["parts"] if each["name"] == name]
    assert len(found) == 1, told["parts"]
    return found[0]


# ---------------------------------------------------------------- moves


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mib", "64", "--api", "runtime"),
        ("--mib", "80", "--api", "segments"),
        ("--mib", "192", "--blocks", "6", "--mixed"),
        ("--mib", "64", "--api", "driver", "--threads", "2", "--children", "1"),
    ],
    ids=["runtime", "segments", "mixed", "driver"],
)
def test_there_and_back_three_times(lab: GpuCluster, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    job = start(lab, *arguments)
    at = SOURCE
    for to in (TARGET, SOURCE) * 3:
        job.await_progress(3)
        told = lab.cluster.move(job, to)
        size = part(told, "park-out")["bytes"]
        assert size >= 32 * MIB
        assert part(told, "refill")["bytes"] == size
        assert part(told, "checkpoint")["bytes"] < told["device_bytes"] - size + MIB
        assert told["device_bytes"] >= size
        assert told["longest_part"]["name"] in {each["name"] for each in told["parts"]} - {"prepare", "empty-cache"}
        job.await_progress(2)
        assert gpu_uses(lab, at) == [0]
        at = to
    ends_well(lab, job, tmp_path, *arguments)
