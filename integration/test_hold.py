"""Ranks whose device memory stays on its GPU until it is sent move between nodes with fake GPUs; failed moves are undone.

Daemons, CRIU, shim, holder, copier and stripes are real; only the driver is fake: its device memory is shared memory of the
machine, which a descriptor keeps as that of a GPU.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import until
from integration.offloads import LARGE, LARGE_MIB, MIB, SOURCE, TARGET, UNDONE, children, part, start
from snapshotd.runtime.faults import Point

#: More than the file system for images may have.
HUGE_MIB, SMALL_MIB = 640, 560
COPIER, FILLER = "snapshotd.holder.copier", "snapshotd.holder.filler"


@pytest.fixture(scope="module")
def holding_lab(fake_gpu_lab: GpuCluster) -> Iterator[GpuCluster]:
    with configured(fake_gpu_lab.cluster, (SOURCE, TARGET), {"hold_device_memory": True}):
        yield fake_gpu_lab


@pytest.fixture
def holding(holding_lab: GpuCluster) -> Iterator[GpuCluster]:
    yield holding_lab
    holding_lab.reset()


def held(lab: GpuCluster) -> list[int]:
    """The processes that keep device memory."""
    return lab.cluster.processes_of("snapshotd.holder.process")


def gone(lab: GpuCluster, program: str) -> bool:
    return not lab.cluster.processes_of(program)


def test_rank_moves_there_and_back_and_nothing_is_copied_while_it_waits(holding: GpuCluster) -> None:
    job = start(holding, *LARGE)
    for at, to in ((SOURCE, TARGET), (TARGET, SOURCE)):
        job.await_progress(3)
        with holding.cluster.moving(job, to, at, Point.OFFLOADED) as asked:
            assert children(holding, at, COPIER)
            assert children(holding, to, FILLER)
            assert held(holding)
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        assert asked.answer["warnings"] == []
        assert part(asked.answer, "offload")["bytes"] == part(asked.answer, "refill")["bytes"] >= LARGE_MIB * MIB
        logged = holding.lab.daemon_log(to).read_text(errors="replace")
        assert "of device memory that were filled while they arrived" in logged
        job.await_progress(2)
        for program in (COPIER, FILLER, "snapshotd.holder.process"):
            until(f"{program} to end", functools.partial(gone, holding, program))
    holding.ends_well(job)


def test_rank_that_is_larger_than_the_memory_for_images_moves(holding: GpuCluster) -> None:
    """Both nodes may use less memory than the rank has on its GPU. Without holding, it is refused before anything is paused.

    What the rank has never used takes no memory of the machine yet: what it has used looks like its host memory here."""
    job = start(holding, *LARGE, "--idle-mib", str(HUGE_MIB))
    job.await_lines(3)
    try:
        for node in (SOURCE, TARGET):
            image_memory(holding, node, f"{SMALL_MIB}m")
        with configured(holding.cluster, (SOURCE, TARGET), {"hold_device_memory": False}):
            refused = holding.cluster.move(job, TARGET, expect=10)
            assert "image-room: the image needs up to" in refused["reason"]
            assert [phase["name"] for phase in refused["phases"]] == ["preflight"]
            job.await_progress(2)
        moved = holding.cluster.move(job, TARGET)
        assert moved["warnings"] == []
        assert part(moved, "offload")["bytes"] == part(moved, "refill")["bytes"] >= HUGE_MIB * MIB
        holding.ends_well(job)
    finally:
        for node in (SOURCE, TARGET):
            image_memory(holding, node, "90%")


def image_memory(lab: GpuCluster, node: str, size: str) -> None:
    """Sets the size of the file system in memory that has the node's images."""
    inside = ["nsenter", "--target", str(lab.lab.daemon_pid(node)), "--mount"]
    subprocess.run([*inside, "mount", "-o", f"remount,size={size}", "/run"], check=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("node", "point"),
    [
        (SOURCE, Point.OFFLOADED),
        (SOURCE, Point.CHECKPOINTED),
        (SOURCE, Point.STREAM),
        (TARGET, Point.REFILLED),
    ],
)
def test_failed_move_gives_the_memory_back_and_a_retry_succeeds(holding: GpuCluster, node: str, point: Point) -> None:
    job = start(holding, *LARGE)
    job.await_lines(5)
    holding.cluster.fault(node, point, "fail")
    result = holding.cluster.move(job, TARGET, expect=UNDONE)
    assert "fault injected" in result["reason"]
    job.await_progress(3)
    holding.cluster.move(job, TARGET)
    holding.ends_well(job)


def test_target_that_is_restarted_keeps_nothing_on_its_gpu(holding: GpuCluster) -> None:
    """Its daemon is killed when the rank has its memory there, and does not run yet."""
    job = start(holding, *LARGE)
    job.await_lines(5)
    holding.cluster.fault(TARGET, Point.REFILLED, "kill")
    with holding.cluster.begin_move(job, TARGET) as move:
        until("the daemon to die", lambda: holding.lab.daemon_pid(TARGET) is None)
        holding.lab.start_daemon(TARGET)
        move.wait(120)
    job.await_progress(3)
    until("the holders to end", lambda: gone(holding, "snapshotd.holder"))
    until("the GPU of the target to be empty", lambda: holding.used_bytes(TARGET) == 0)
    holding.ends_well(job)


def test_memory_outlives_the_daemon(holding: GpuCluster) -> None:
    """Its daemon is killed while the memory belongs to no process: the next one gives it back."""
    job = start(holding, *LARGE)
    job.await_lines(5)
    holding.cluster.fault(SOURCE, Point.CHECKPOINTED, "kill")
    with holding.cluster.begin_move(job, TARGET) as move:
        until("the daemon to die", lambda: holding.lab.daemon_pid(SOURCE) is None)
        assert held(holding)
        holding.lab.start_daemon(SOURCE)
        move.wait(120)
    job.await_progress(3)
    until("the holder to end", lambda: not held(holding))
    holding.cluster.move(job, TARGET)
    holding.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("node", "program"), [(SOURCE, COPIER), (TARGET, FILLER)])
def test_killed_process_that_copies_is_replaced(holding: GpuCluster, node: str, program: str) -> None:
    job = start(holding, *LARGE)
    job.await_lines(5)
    with holding.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED) as asked:
        (copier,) = children(holding, node, program)
        os.kill(copier, signal.SIGKILL)
        until("it to be gone", lambda: not Path(f"/proc/{copier}").exists())
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    holding.ends_well(job)


@pytest.mark.sampled(1, group="hold")
def test_lost_memory_ends_the_rank(holding: GpuCluster) -> None:
    """The process that keeps it is killed, and so is the copier: no process has the memory any more."""
    job = start(holding, *LARGE)
    job.await_lines(5)
    with holding.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED):
        for pid in [*held(holding), *children(holding, SOURCE, COPIER)]:
            os.kill(pid, signal.SIGKILL)
    assert job.finish() != 0
