"""Ranks whose processes share device memory (CUDA IPC) move between nodes with fake GPUs; failed moves are undone.

Each step of the job changes the shared memory from all processes and compares what they find in it. Daemons, CRIU and the
shim are real; the fake driver restores no process that has memory of another one, as the real one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import Job
from integration.job_commands import ask
from integration.job_device_memory import kill
from integration.offloads import SOURCE, TARGET, UNDONE, part, start
from snapshotd.runtime.faults import Point

SHARED = ("--mib", "16", "--blocks", "4", "--api", "runtime", "--shared", "2")


@pytest.fixture(scope="module", params=[True, False], ids=["held", "files"])
def sharing_lab(fake_gpu_lab: GpuCluster, request: pytest.FixtureRequest) -> Iterator[GpuCluster]:
    with configured(fake_gpu_lab.cluster, (SOURCE, TARGET), {"hold_device_memory": request.param}):
        yield fake_gpu_lab


@pytest.fixture
def sharing(sharing_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield sharing_lab
    sharing_lab.reset()


def begun(lab: GpuCluster) -> Job:
    job = start(lab, *SHARED)
    job.await_lines(5)
    return job


def test_rank_that_shares_memory_moves_there_and_back_twice(sharing: GpuCluster) -> None:
    job = begun(sharing)
    check = sharing.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    assert "3 handles exported, 4 opened" in check.stdout
    for to in (TARGET, SOURCE, TARGET, SOURCE):
        moved = sharing.cluster.move(job, to)
        assert moved["warnings"] == []
        assert part(moved, "close-shared")
        job.await_progress(3)
    sharing.ends_well(job)


@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.READY),
        (SOURCE, Point.LOCKED),
        (SOURCE, Point.SHARED_CLOSED),
        (SOURCE, Point.OFFLOADED),
        (SOURCE, Point.CHECKPOINTED),
        (SOURCE, Point.STREAM),
        (TARGET, Point.REFILLED),
        (TARGET, Point.RESTORED),
    ],
)
def test_failed_move_is_undone_and_a_retry_succeeds(sharing: GpuCluster, node: str, point: Point) -> None:
    job = begun(sharing)
    sharing.cluster.fault(node, point, "fail")
    result = sharing.cluster.move(job, TARGET, expect=UNDONE)
    assert "fault injected" in result["reason"]
    job.await_progress(3)
    sharing.cluster.move(job, TARGET)
    job.await_progress(2)
    sharing.ends_well(job)


def test_rank_that_shares_memory_is_snapshotted_and_rolled_back(sharing: GpuCluster) -> None:
    """When it goes on it has a copy of what it had, made on the GPU where it is held: all its processes see the copy."""
    job = begun(sharing)
    ask(sharing.cluster, "snapshot", job.name)
    job.await_progress(3)
    ask(sharing.cluster, "snapshot", job.name)
    job.await_progress(3)
    kill(sharing, job)
    ask(sharing.cluster, "rollback", job.name)
    job.await_progress(3)
    sharing.ends_well(job)
