"""NCCL's features stay on: what each leaves in a process when its communicators are destroyed, and moves with all of them on.

NVLink SHARP and sharing of host memory need several GPUs: with one GPU NCCL is told to use them, and the recorded log says
whether it did. DEVICE=cpu skips everything here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.gpu import nccl_leavings
from integration.gpu.gpu_jobs import RUN_OPTIONS, SOURCE, TARGET, measured, needs_cuda, record
from integration.harness import Cluster
from integration.torch_jobs import TorchJob, TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300), needs_cuda()]

PATIENCE_S = 120.0
FEATURES = {"NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}


def of_nccl(found: dict[str, Any]) -> set[str]:
    """Whether threads or sockets are left. Those of torch and of the CUDA driver have names of their own."""
    threads = [name for name in found["left"].get("threads", {}) if not name.startswith(("pt_", "cuda"))]
    return {kind for kind, there in (("threads", bool(threads)), ("sockets", "sockets" in found["left"])) if there}


@pytest.mark.parametrize("name", [name for name in nccl_leavings.SETTINGS if name not in {"ras", "nccl-defaults"}])
def test_no_thread_and_no_socket_is_left_with_performance_features_on(name: str) -> None:
    found = nccl_leavings.measure(name)
    record(f"nccl-leavings-{name}", **found)
    assert not of_nccl(found), found


@pytest.mark.parametrize("name", ["ras", "nccl-defaults"])
def test_ras_keeps_a_thread_and_sockets(name: str) -> None:
    """Why a move ends it. If this fails, NCCL has learnt to end RAS, and the default should be looked at."""
    found = nccl_leavings.measure(name)
    record(f"nccl-leavings-{name}", **found)
    assert of_nccl(found) == {"threads", "sockets"}, found


@pytest.fixture
def torch_lab(nodes: Cluster) -> Iterator[TorchLab]:
    with at_rest(nodes, RUN_OPTIONS) as lab:
        yield lab


def start(lab: TorchLab, **settings: str) -> TorchJob:
    words = [f"{name}={value}" for name, value in settings.items()]
    job = lab.plain(
        "gpu_nccl_alone.py",
        *("--kind", "ddp", "--until", "{end}"),
        nodes=(SOURCE,),
        name="features",
        wrapper=("env", *words),
    )
    job.await_steps(5, PATIENCE_S)
    return job


def ends_well(job: TorchJob) -> None:
    job.end.touch()
    assert set(job.finish(PATIENCE_S)) == {0}, f"{job.text()}\n{job.cluster.logs()}"


@pytest.mark.parametrize("ras", ["0", "1"])
def test_rank_moves_there_and_back_with_all_performance_features_on(torch_lab: TorchLab, ras: str) -> None:
    """With RAS on, the move ends it, and NCCL starts it again."""
    settings = {**FEATURES, "NCCL_RAS_ENABLE": ras}
    undisturbed = torch_lab.undisturbed("gpu_nccl_alone.py", "--kind", "ddp", "--pace-s", "0", world=1)
    job = start(torch_lab, **settings)
    results: list[dict[str, Any]] = []
    for to in (TARGET, SOURCE):
        results.append(measured(job.move(0, to, timeout_s=PATIENCE_S)))
        job.await_progress(10, PATIENCE_S)
        assert job.where() == {0: to}
    ends_well(job)
    mine, theirs = job.lines()[0], undisturbed[0]
    assert mine == theirs[: len(mine)]
    record(f"nccl-features-on-ras-{ras}", settings=settings, steps=len(mine), moves=results)
