"""Ranks whose processes share device memory (CUDA IPC) move between nodes with fake GPUs; failed moves are undone.

Each step of the job changes the shared memory from all processes and compares what they find in it. Daemons, CRIU and the
shim are real; the fake driver restores no process that has memory of another one, as the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import Job
from integration.job_commands import ask
from integration.job_device_memory import kill
from integration.offloads import SOURCE, TARGET, UNDONE, part
from snapshotd.runtime.faults import Point

REFUSED = 10
LARGE = ("--mib", "16", "--blocks", "4", "--api", "runtime")
SHARED, EXPORTED = (*LARGE, "--shared", "2"), (*LARGE, "--export")


@pytest.fixture(scope="module", params=[True, False], ids=["held", "files"])
def sharing_lab(fake_gpu_lab: GpuCluster, request: pytest.FixtureRequest) -> Iterator[GpuCluster]:
    keys = {"hold_device_memory": request.param, "move_shared_device_memory": True}
    with configured(fake_gpu_lab.cluster, (SOURCE, TARGET), keys):
        yield fake_gpu_lab


@pytest.fixture
def sharing(sharing_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield sharing_lab
    sharing_lab.reset()


def begun(lab: GpuCluster, arguments: Sequence[str] = SHARED, device_memory: str = "shared") -> Job:
    job = lab.job(SOURCE, *arguments, pace_s=0.05, options=("--device-memory", device_memory))
    job.await_lines(5)
    return job


def checked(lab: GpuCluster, job: Job) -> str:
    return lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET).stdout


def test_rank_that_shares_memory_moves_there_and_back_twice(sharing: GpuCluster) -> None:
    job = begun(sharing)
    assert "3 handles exported, 4 opened" in checked(sharing, job)
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


def test_job_that_was_started_as_usual_is_refused(sharing: GpuCluster) -> None:
    job = begun(sharing, EXPORTED, "offload")
    assert "that does not move with it" in (said := checked(sharing, job))
    assert "--device-memory shared" in said
    sharing.cluster.move(job, TARGET, expect=REFUSED)
    sharing.ends_well(job)


@pytest.mark.parametrize("node", [SOURCE, TARGET])
def test_setting_of_the_node_that_the_rank_leaves_counts(sharing: GpuCluster, node: str) -> None:
    with configured(sharing.cluster, [node], {"move_shared_device_memory": False}):
        job = begun(sharing)
        if node == SOURCE:
            assert "move_shared_device_memory = true" in checked(sharing, job)
            sharing.cluster.move(job, TARGET, expect=REFUSED)
        else:
            sharing.cluster.move(job, TARGET)
        sharing.ends_well(job)
