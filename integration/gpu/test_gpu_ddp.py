"""One of two DDP ranks that share the GPU, over gloo, moves; the output of both is that of an undisturbed job."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.gpu.gpu_jobs import ON_GPU, OTHER, PATIENCE_S, RUN_OPTIONS, SOURCE, TARGET, measured, needs_gpu, record
from integration.harness import Cluster
from integration.torch_jobs import TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400), needs_gpu()]

STEPS = ("--steps", "1500" if ON_GPU else "600")
PACE = ("--pace-s", "0.02" if ON_GPU else "0.1")


@pytest.fixture
def torch_lab(nodes: Cluster) -> Iterator[TorchLab]:
    with at_rest(nodes, RUN_OPTIONS) as lab:
        yield lab


def test_one_rank_of_a_ddp_job_moves_and_both_are_bit_identical(torch_lab: TorchLab) -> None:
    seed = time.time_ns() % 2**31
    with ThreadPoolExecutor(1) as pool:
        job = torch_lab.plain("gpu_ddp.py", *STEPS, *PACE, "--until", "{end}", nodes=(SOURCE, OTHER), name="gpuddp")
        alone = pool.submit(torch_lab.undisturbed, "gpu_ddp.py", *STEPS, "--pace-s", "0", world=2)
        job.await_steps(random.Random(seed).randint(20, 60), PATIENCE_S)
        result = job.move(1, TARGET, timeout_s=PATIENCE_S)
        job.await_progress(10, PATIENCE_S)
        assert job.where() == {0: SOURCE, 1: TARGET}
        job.end.touch()
        job.assert_whole()
        undisturbed = alone.result()
    for rank, (lines, theirs) in enumerate(zip(job.lines(), undisturbed, strict=True)):
        assert " digest " in lines[-1]
        assert lines == theirs[: len(lines)], f"rank {rank} says something else than an undisturbed one"
    record("ddp", seed=seed, steps=len(job.lines()[0]), peers_stopped_s=result["peers_stopped_s"], **measured(result))
