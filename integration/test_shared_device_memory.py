"""Ranks whose processes share device memory (CUDA IPC) move between nodes with fake GPUs, or are refused.

Failures and killed daemons at all points: test_memory_contract.py. Here processes of the rank are killed.

Each step of the job changes the shared memory from all processes and compares what they find in it. Daemons, CRIU and the
shim are real; the fake driver restores no process that has memory of another one, as the real one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

import pytest

from integration.configuring import configured
from integration.drill import kill as kill_process
from integration.drill import node_of
from integration.gpu_nodes import GpuCluster
from integration.harness import Job
from integration.job_commands import ask, reaching
from integration.job_device_memory import kill
from integration.offloads import SOURCE, TARGET, UNDONE, part
from snapshotd.runtime.faults import Point

pytestmark = pytest.mark.sampled(2, group="shared device memory")

REFUSED = 10
LARGE = ("--mib", "16", "--blocks", "4", "--api", "runtime")
SHARED, EXPORTED = (*LARGE, "--shared", "2"), (*LARGE, "--export")


@pytest.fixture(scope="module", params=[True, False], ids=["held", "files"])
def sharing_lab(fake_gpu_lab: GpuCluster, request: pytest.FixtureRequest) -> Iterator[GpuCluster]:
    with configured(fake_gpu_lab.cluster, (SOURCE, TARGET), {"hold_device_memory": request.param}):
        yield fake_gpu_lab


@pytest.fixture
def sharing(sharing_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield sharing_lab
    sharing_lab.reset()


def begun(lab: GpuCluster, arguments: Sequence[str] = SHARED, device_memory: str = "shared") -> Job:
    job = lab.job(SOURCE, *arguments, pace_s=0.05, options=("--device-memory", device_memory))
    job.await_lines(5)
    return job


def move(job: Job) -> list[str]:
    return ["move", "--rank", "0", "--job", job.name, "--to", TARGET]


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


def guests_on(lab: GpuCluster, node: str) -> list[int]:
    return [pid for pid in lab.cluster.processes_of("device_guest.py") if node_of(pid) == node]


def test_move_whose_copy_loses_a_process_is_undone(sharing: GpuCluster) -> None:
    """The copy cannot have back what that process has shared. The rank has all of it on its source."""
    job = begun(sharing)
    with reaching(sharing.cluster, TARGET, Point.REFILLED, "wait", *move(job)) as asked:
        kill_process(guests_on(sharing, TARGET)[0])
    assert (asked.code, asked.answer["outcome"]) == (UNDONE, "undone")
    assert "its owner has ended" in asked.answer["reason"]
    job.await_progress(3)
    sharing.cluster.move(job, TARGET)
    sharing.ends_well(job)


@pytest.mark.parametrize("point", [Point.LOCKED, Point.SHARED_CLOSED, Point.OFFLOADED, Point.CHECKPOINTED])
def test_rank_that_loses_a_process_in_the_freeze_is_ended_and_not_left_parked(
    sharing: GpuCluster, point: Point
) -> None:
    """The others cannot have back what that process has shared. Before anything is closed they have it, and the rank goes on,
    until it asks its child."""
    job = begun(sharing)
    with reaching(sharing.cluster, SOURCE, point, "wait", *move(job)) as asked:
        kill_process(guests_on(sharing, SOURCE)[0])
    assert asked.answer["outcome"] == "undone"
    if point == Point.LOCKED:
        assert job.finish() == 1
    else:
        assert "the rank was ended: device memory that process" in asked.answer["reason"]
        assert job.finish() == -signal.SIGKILL
    sharing.nothing_left()


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


def test_ranks_that_share_memory_with_each_other_are_refused(sharing: GpuCluster) -> None:
    handle = str(sharing.cluster.folder / "lent")
    owner = begun(sharing, (*LARGE, "--lend", handle))
    guest = begun(sharing, (*LARGE, "--borrow", handle))
    assert "processes that are not in the rank have opened its device memory" in checked(sharing, owner)
    assert "is of processes that are not in the rank, or have ended" in checked(sharing, guest)
    for job in (owner, guest):
        sharing.cluster.move(job, TARGET, expect=REFUSED)
    sharing.ends_well(guest, owner)
