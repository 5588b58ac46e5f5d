"""Ranks move between two nodes of one machine that use the same GPU: their device memory is handed over, and not sent.

Daemons, CRIU, shim and holders are real; only the driver is fake. Both nodes list a GPU with the same UUID.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, until
from integration.offloads import LARGE, LARGE_MIB, MIB, SOURCE, TARGET, UNDONE, children, part, start
from snapshotd.runtime.faults import Point
from tests.fakes.cuda_fake import gpus

pytestmark = pytest.mark.sampled(2, group="memory that is handed over")

COPIER, FILLER, HOLDER = "snapshotd.holder.copier", "snapshotd.holder.filler", "snapshotd.holder.process"
SIZE = LARGE_MIB * MIB


@pytest.fixture
def one_gpu(fake_gpu_lab: GpuCluster) -> Iterator[GpuCluster]:
    share(fake_gpu_lab, SOURCE)
    yield fake_gpu_lab
    fake_gpu_lab.reset()
    share(fake_gpu_lab, TARGET)


def share(lab: GpuCluster, whose: str) -> None:
    """The target's GPU is that of this node from now on."""
    lab.give(TARGET, *gpus(whose))
    lab.restart(TARGET)


def nothing_kept(lab: GpuCluster) -> None:
    until("the holders to end", lambda: not lab.cluster.processes_of("snapshotd.holder"))


def test_rank_moves_there_and_back_without_its_memory_being_sent(one_gpu: GpuCluster) -> None:
    job = start(one_gpu, *LARGE)
    for at, to in ((SOURCE, TARGET), (TARGET, SOURCE), (SOURCE, TARGET)):
        job.await_progress(3)
        with one_gpu.cluster.moving(job, to, at, Point.OFFLOADED) as asked:
            assert not children(one_gpu, at, COPIER)
            assert not children(one_gpu, to, FILLER)
            assert len(one_gpu.cluster.processes_of(HOLDER)) == 2
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        assert asked.answer["warnings"] == []
        assert part(asked.answer, "take-over")["bytes"] == part(asked.answer, "offload")["bytes"] >= SIZE
        assert "refill" not in {one["name"] for one in asked.answer["parts"]}
        assert asked.answer["handed_over_bytes"] >= SIZE > asked.answer["bytes"]
        last = json.loads(one_gpu.cluster.migrator("history", "--json").stdout)["moves"][0]
        assert last["handed_over_bytes"] == asked.answer["handed_over_bytes"]
        assert last["bytes"] < SIZE
        assert "took over" in one_gpu.lab.daemon_log(to).read_text(errors="replace")
        job.await_progress(2)
        nothing_kept(one_gpu)
    one_gpu.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("node", [SOURCE, TARGET])
def test_either_node_can_have_the_memory_sent(one_gpu: GpuCluster, node: str) -> None:
    job = start(one_gpu, *LARGE)
    job.await_progress(3)
    with configured(one_gpu.cluster, [node], {"hand_over_device_memory": False}):
        moved = one_gpu.cluster.move(job, TARGET)
    assert part(moved, "refill")["bytes"] >= SIZE
    one_gpu.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("node", "point"), [(SOURCE, Point.OFFLOADED), (SOURCE, Point.STREAM), (TARGET, Point.REFILLED)]
)
def test_failed_move_gives_the_memory_back_and_a_retry_succeeds(one_gpu: GpuCluster, node: str, point: Point) -> None:
    """Before and after the restored copy has the memory, too."""
    job = start(one_gpu, *LARGE)
    job.await_lines(5)
    one_gpu.cluster.fault(node, point, "fail")
    result = one_gpu.cluster.move(job, TARGET, expect=UNDONE)
    assert "fault injected" in result["reason"]
    job.await_progress(3)
    nothing_kept(one_gpu)
    again = one_gpu.cluster.move(job, TARGET)
    assert part(again, "take-over")["bytes"] >= SIZE
    one_gpu.ends_well(job)


@pytest.mark.parametrize(
    ("node", "point", "ends_on"), [(TARGET, Point.REFILLED, SOURCE), (SOURCE, Point.COMMIT, TARGET)]
)
def test_both_daemons_are_killed_in_the_middle(one_gpu: GpuCluster, node: str, point: Point, ends_on: str) -> None:
    """Before COMMIT the source has the memory, afterwards the target."""
    job = start(one_gpu, *LARGE)
    job.await_lines(5)
    one_gpu.cluster.fault(node, point, "wait")
    with one_gpu.cluster.begin_move(job, TARGET) as move:
        until(f"{point} on {node}", lambda: one_gpu.cluster.fired(node))
        for one in (SOURCE, TARGET):
            one_gpu.lab.kill_daemon(one)
        for one in (SOURCE, TARGET):
            one_gpu.lab.start_daemon(one, timeout_s=PATIENCE_S)
        move.wait(120)
    job.await_progress(3)
    nothing_kept(one_gpu)
    assert {one["at_node"] for one in one_gpu.cluster.ps(job)} == {ends_on}
    one_gpu.cluster.move(job, SOURCE if ends_on == TARGET else TARGET)
    one_gpu.ends_well(job)


def test_driver_checkpoints_memory_that_was_handed_over(one_gpu: GpuCluster) -> None:
    """It cannot restore a process with memory that another one created: that becomes the process's own first."""
    job = start(one_gpu, *LARGE)
    job.await_progress(3)
    one_gpu.cluster.move(job, TARGET)
    job.await_progress(2)
    with configured(one_gpu.cluster, [TARGET], {"hold_device_memory": False}):
        inside = ["nsenter", "--target", str(one_gpu.lab.daemon_pid(TARGET)), "--mount", "mount", "-o"]
        subprocess.run([*inside, "remount,size=256m", "/run"], check=True)  # no room for files
        try:
            moved = one_gpu.cluster.move(job, SOURCE)
        finally:
            subprocess.run([*inside, "remount,size=90%", "/run"], check=True)
    assert any("the driver's checkpoint carries the device memory" in text for text in moved["warnings"])
    one_gpu.ends_well(job)


def test_processes_share_memory_that_was_handed_over(one_gpu: GpuCluster) -> None:
    """Its owner cannot export it, and gives the others what it has got itself. An undo finds them with it open."""
    job = one_gpu.job(SOURCE, *LARGE, "--shared", "2", pace_s=0.05, options=("--device-memory", "shared"))
    job.await_lines(5)
    for node, point in ((SOURCE, Point.OFFLOADED), (TARGET, Point.REFILLED)):
        one_gpu.cluster.fault(node, point, "fail")
        assert "fault injected" in one_gpu.cluster.move(job, TARGET, expect=UNDONE)["reason"]
        job.await_progress(3)
    for to in (TARGET, SOURCE):
        moved = one_gpu.cluster.move(job, to)
        assert part(moved, "take-over")["bytes"] == part(moved, "offload")["bytes"] >= SIZE
        job.await_progress(3)
    one_gpu.ends_well(job)
