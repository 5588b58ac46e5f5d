"""Whole jobs on the real GPU are suspended, resumed, snapshotted and rolled back, with the real NCCL. Their output is that of
undisturbed jobs. DEVICE=cpu runs the same tests over gloo, without NCCL.

One job has one rank with a communicator of its own (any collective). The two ranks of the other share the GPU and take turns.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.gpu.gpu_jobs import ON_GPU, OTHER, RUN_OPTIONS, SOURCE, TARGET, measured, needs_gpu, record
from integration.gpu.test_gpu_nccl import PATIENCE_S, assert_as, ends_well, said_wrong
from integration.harness import Cluster
from integration.torch_jobs import TorchJob, TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600), needs_gpu()]


@pytest.fixture
def torch_lab(nodes: Cluster) -> Iterator[TorchLab]:
    with at_rest(nodes, RUN_OPTIONS) as lab:
        yield lab


def ask(job: TorchJob, verb: str, *more: str) -> dict[str, Any]:
    done = job.cluster.migrator("job", verb, job.name, *more, "--json", timeout_s=PATIENCE_S)
    said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{job.text()}\n{job.cluster.logs()}"
    assert done.returncode == 0, said
    answer: dict[str, Any] = json.loads(done.stdout)
    steps = {phase["name"] for phase in answer["phases"]}
    wanted = {"suspend": {"quiesce", "detach"}, "snapshot": {"quiesce", "detach", "reattach"}}.get(verb, {"reattach"})
    assert not ON_GPU or wanted <= steps, said
    return answer


def kill_a_rank(job: TorchJob, rank: int) -> None:
    mark = f"\0RANK={rank}\0".encode()
    ranks = job.cluster.processes_of(str(job.end))
    (pid,) = [pid for pid in ranks if mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(pid, signal.SIGKILL)


def test_job_with_one_rank_is_suspended_snapshotted_and_rolled_back(torch_lab: TorchLab) -> None:
    kind = ("--kind", "ddp")
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(torch_lab.undisturbed, "gpu_nccl_alone.py", *kind, "--pace-s", "0", world=1)
        go_and_end = ("--go", "{end}.go", "--until", "{end}")
        job = torch_lab.plain("gpu_nccl_alone.py", *kind, *go_and_end, nodes=(SOURCE,), name="wholejob")
        job.await_steps(1, PATIENCE_S)
        undisturbed = alone.result()
    job.end.with_name(f"{job.end.name}.go").touch()
    job.await_progress(5, PATIENCE_S)
    results = {"suspend": measured(ask(job, "suspend")), "resume": measured(ask(job, "resume", "--on", f"0={TARGET}"))}
    job.await_progress(5, PATIENCE_S)
    results["snapshot"] = measured(ask(job, "snapshot"))
    job.await_progress(5, PATIENCE_S)
    kill_a_rank(job, 0)
    results["rollback"] = measured(ask(job, "rollback"))
    job.await_progress(5, PATIENCE_S)
    ends_well(job)
    assert_as(job, undisturbed)
    record("whole-job-one-rank", **results)


def test_job_whose_two_ranks_share_the_gpu_is_snapshotted_and_rolled_back(torch_lab: TorchLab) -> None:
    turns = torch_lab.cluster.folder / f"turns-{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(torch_lab.undisturbed, "gpu_nccl.py", "--pace-s", "0", "--margin-s", "0", world=2)
        flags = ("--turns", str(turns), "--until", "{end}")
        job = torch_lab.plain("gpu_nccl.py", *flags, nodes=(SOURCE, OTHER), name="wholejobs")
        job.await_steps(8, PATIENCE_S)
        undisturbed = alone.result()  # from here on only the job uses the GPU
    turns.touch()
    try:
        job.await_progress(2, PATIENCE_S)
        results = {"snapshot": measured(ask(job, "snapshot"))}
        job.await_progress(5, PATIENCE_S)
        assert said_wrong(job) == []
        kill_a_rank(job, 1)
        results["rollback"] = measured(ask(job, "rollback", "--on", f"1={TARGET}"))
        job.await_progress(5, PATIENCE_S)
        assert job.where() == {0: SOURCE, 1: TARGET}
        assert said_wrong(job) == []
    finally:
        turns.unlink()
    ends_well(job)
    assert_as(job, undisturbed)
    record("whole-job-two-ranks", **results)
