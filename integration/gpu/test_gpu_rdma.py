"""NCCL ranks with an open RDMA device move on the real GPU. NCCL, CUDA and CRIU are real; libibverbs is the fake, of which a
device is a file and a queue pair is a pair of TCP connections. Nothing here has seen InfiniBand hardware.

integration/gpu/rdma_probe.py shows the same without a lab, step by step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.gpu.gpu_jobs import OTHER, RUN_OPTIONS, SOURCE, TARGET, measured, needs_cuda, record
from integration.gpu.test_gpu_nccl import PATIENCE_S, assert_as, ends_well, move, said_wrong
from integration.harness import Cluster
from integration.nccl_nodes import rdma_devices, verbs_dir
from integration.torch_jobs import TorchLab, at_rest
from tests.fakes import verbs_fake

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300), needs_cuda()]

ROUNDS = 10


@pytest.fixture
def rdma_lab(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLab]:
    """Every node has one device, and NCCL must use it. Device memory is not registered with it."""
    variables = {
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(verbs_dir()), os.environ.get("LD_LIBRARY_PATH")])),
        **verbs_fake.REAL_NCCL,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with rdma_devices(nodes, 1), at_rest(nodes, RUN_OPTIONS) as lab:
        yield lab


def test_rank_with_an_open_rdma_device_moves_there_and_back(rdma_lab: TorchLab) -> None:
    arguments = ("gpu_nccl_alone.py", "--kind", "ddp")
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(rdma_lab.undisturbed, *arguments, "--pace-s", "0", world=1)
        go_and_end = ("--go", "{end}.go", "--until", "{end}")
        job = rdma_lab.plain(*arguments, *go_and_end, nodes=(SOURCE,), name="rdma")
        job.await_steps(1, PATIENCE_S)
        undisturbed = alone.result()
    job.end.with_name(f"{job.end.name}.go").touch()
    results = []
    for to in (TARGET, SOURCE):
        job.await_progress(ROUNDS, PATIENCE_S)
        results.append(measured(move(job, 0, to)))
        job.await_progress(ROUNDS, PATIENCE_S)
        assert job.where() == {0: to}
    ends_well(job)
    assert_as(job, undisturbed)
    record("nccl-rdma", steps=len(job.lines()[0]), moves=results)


def test_one_of_two_ranks_that_communicate_over_queue_pairs_moves(rdma_lab: TorchLab) -> None:
    turns = rdma_lab.cluster.folder / f"turns-{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(rdma_lab.undisturbed, "gpu_nccl.py", "--pace-s", "0", "--margin-s", "0", world=2)
        flags = ("--turns", str(turns), "--until", "{end}")
        job = rdma_lab.plain("gpu_nccl.py", *flags, nodes=(SOURCE, OTHER), name="rdma")
        job.await_steps(8, PATIENCE_S)
        undisturbed = alone.result()  # from here on only the job uses the GPU
    turns.touch()
    results = []
    try:
        job.await_progress(2, PATIENCE_S)
        for to in (TARGET, OTHER):
            results.append(measured(move(job, 1, to)))
            job.await_progress(ROUNDS, PATIENCE_S)
            assert job.where() == {0: SOURCE, 1: to}
            assert said_wrong(job) == []
    finally:
        turns.unlink()
    ends_well(job)
    assert_as(job, undisturbed)
    record("nccl-rdma-two-ranks", steps=len(job.lines()[0]), moves=results)
