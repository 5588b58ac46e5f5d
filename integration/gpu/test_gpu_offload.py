"""The shim offloads device memory: it copies it to the host, releases it, and maps it again at the same addresses. So it
does where memory cannot stay on its GPU until it is sent (`hold_device_memory` is off here).

Covers every allocator of torch, memory that is left to the driver, and a job that does everything at once. All output
is bit-identical to that of an undisturbed run. The rest of the suite also runs with `SNAPSHOT_GPU_MEMORY=driver`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu.gpu_jobs import (
    GIB,
    OTHER,
    SOURCE,
    STEPS,
    TARGET,
    Training,
    Undisturbed,
    hold_device_memory,
    measured,
    needs_cuda,
    record,
    undisturbed_runs,
)
from integration.gpu.test_gpu_moves import COMPILES, Variant
from integration.harness import Cluster

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_cuda()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
_BALLAST = ("--gib", "2")
#: Everything that can launch work, at once: autograd, streams, user threads, a graph, workers with pinned memory.
BUSY = ("--amp", "fp16", "--graph", "--streams", "--threads", "--loader", "fork")

ALLOCATORS = (
    Variant("native", _BALLAST),
    Variant("expandable", _BALLAST, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Variant("mixed", (*_BALLAST, "--raw-mib", "256")),
    Variant("cached", (*_BALLAST, "--cached-gib", "1")),
    Variant("busy", (*_BALLAST, *BUSY)),
    # With cuDNN and Triton, but without a graph, which works only for a model that is not compiled.
    Variant("compiled", (*_BALLAST, "--conv", "--compile", "--streams", "--threads", "--loader", "fork"), COMPILES),
)
#: Memory of the driver's own pools is left to the driver's checkpoint. The rank moves nevertheless.
POOLS = Variant("pools", _BALLAST, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
THERE_AND_BACK = Variant("offload-everything", (*_BALLAST, "--raw-mib", "128", *BUSY), steps=2 * STEPS)
ROUND_TRIPS = 5


@pytest.fixture(scope="module", autouse=True)
def files(plain_lab: Cluster) -> Iterator[None]:
    hold_device_memory(plain_lab, plain_lab.lab.nodes, on=False)
    yield
    hold_device_memory(plain_lab, plain_lab.lab.nodes, on=True)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with undisturbed_runs(FOLDER) as runs:
        yield runs


def _start(nodes: Cluster, variant: Variant) -> Training:
    name = f"offload-{variant}"
    return Training.start(nodes, name, variant.arguments, variant.environment, device_memory="offload")


def _part_bytes(result: dict[str, Any], name: str) -> int:
    return sum(part["bytes"] for part in result["parts"] if part["name"] == name)


@pytest.mark.parametrize("variant", ALLOCATORS, ids=str)
def test_offloaded_memory_of_a_moved_job_is_bit_identical(
    nodes: Cluster, undisturbed: Undisturbed, variant: Variant
) -> None:
    training = _start(nodes, variant)
    at = training.await_moment()
    result = training.move(TARGET)
    assert _part_bytes(result, "offload") >= 2 * GIB
    assert _part_bytes(result, "refill") == _part_bytes(result, "offload")
    training.runs_on(TARGET)
    steps = training.ends_as(undisturbed.want(variant.arguments, variant.environment))
    record(f"offload-{variant}", at_step=at, steps=steps, seed=training.seed, **measured(result))


def test_memory_that_cannot_be_offloaded_moves_with_the_driver(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = _start(nodes, POOLS)
    training.await_moment()
    result = training.move(TARGET)
    assert not _part_bytes(result, "offload")
    training.runs_on(TARGET)
    training.ends_as(undisturbed.want(POOLS.arguments, POOLS.environment))
    record(f"offload-{POOLS}", seed=training.seed, **measured(result))


def test_offloaded_job_moves_there_and_back_five_times(nodes: Cluster, undisturbed: Undisturbed) -> None:
    training = _start(nodes, THERE_AND_BACK)
    training.await_moment()
    results = []
    for _ in range(ROUND_TRIPS):
        for to in (OTHER, SOURCE):
            results.append(measured(training.move(to)))
            training.await_progress()
    training.runs_on(SOURCE)
    steps = training.ends_as(undisturbed.want(THERE_AND_BACK.arguments, THERE_AND_BACK.environment))
    record(f"there-and-back-{THERE_AND_BACK}", steps=steps, seed=training.seed, moves=results)
