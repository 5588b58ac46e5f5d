"""Ranks whose device memory stays on its GPU until it is sent move between nodes with fake GPUs; failed moves are undone.

Daemons, CRIU, shim, holder, copier and stripes are real; only the driver is fake: its device memory is shared memory of the
machine, which a descriptor keeps as that of a GPU.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from pathlib import Path

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import Job, until
from integration.offloads import LARGE, LARGE_MIB, MIB, SOURCE, TARGET, UNDONE, children, part, start
from snapshotd.runtime.faults import Point

pytestmark = pytest.mark.sampled(3, group="hold")

#: More than the file system for images may have.
HUGE_MIB, SMALL_MIB = 640, 560
COPIER, FILLER = "snapshotd.holder.copier", "snapshotd.holder.filler"


def held(lab: GpuCluster) -> list[int]:
    """The processes that keep device memory."""
    return lab.cluster.processes_of("snapshotd.holder.process")


def holder_of(lab: GpuCluster, node: str) -> int:
    """The process that keeps device memory on this node."""
    there = os.readlink(f"/proc/{lab.lab.daemon_pid(node)}/ns/mnt")
    (pid,) = [pid for pid in held(lab) if os.readlink(f"/proc/{pid}/ns/mnt") == there]
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until("it to be gone", lambda: not Path(f"/proc/{pid}").exists())


def gone(lab: GpuCluster, program: str) -> bool:
    return not lab.cluster.processes_of(program)


def test_rank_moves_there_and_back_and_nothing_is_copied_while_it_waits(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    for at, to in ((SOURCE, TARGET), (TARGET, SOURCE)):
        job.await_progress(3)
        with lab.cluster.moving(job, to, at, Point.OFFLOADED) as asked:
            assert children(lab, at, COPIER)
            assert children(lab, to, FILLER)
            assert held(lab)
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        assert asked.answer["warnings"] == []
        assert part(asked.answer, "offload")["bytes"] == part(asked.answer, "refill")["bytes"] >= LARGE_MIB * MIB
        logged = lab.lab.daemon_log(to).read_text(errors="replace")
        assert "of device memory that were filled while they arrived" in logged
        job.await_progress(2)
        for program in (COPIER, FILLER, "snapshotd.holder.process"):
            until(f"{program} to end", functools.partial(gone, lab, program))
    lab.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("node", [SOURCE, TARGET])
def test_nodes_need_not_agree(lab: GpuCluster, node: str) -> None:
    """One of them is switched off: it needs host memory for all of it, and nothing else is different."""
    job = start(lab, *LARGE)
    job.await_lines(3)  # it says so if it has to wait for a daemon that is being restarted
    with configured(lab.cluster, [node], {"hold_device_memory": False}):
        for at, to in ((SOURCE, TARGET), (TARGET, SOURCE)):
            job.await_progress(3)
            with lab.cluster.moving(job, to, at, Point.OFFLOADED) as asked:
                assert bool(children(lab, at, COPIER)) == (at != node)
                assert not children(lab, to, FILLER)
            assert asked.code == 0, f"{asked.answer} {asked.errors}"
            assert asked.answer["warnings"] == []
            assert part(asked.answer, "refill")["bytes"] == part(asked.answer, "offload")["bytes"] >= LARGE_MIB * MIB
        lab.ends_well(job)


def test_memory_that_cannot_be_exported_goes_through_files(lab: GpuCluster) -> None:
    """As torch's expandable segments create it. It is not a fault of the nodes, so there is no warning."""
    job = start(lab, "--mib", str(LARGE_MIB), "--api", "segments")
    job.await_progress(3)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED) as asked:
        assert not children(lab, SOURCE, COPIER)
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    assert asked.answer["warnings"] == []
    assert part(asked.answer, "refill")["bytes"] == part(asked.answer, "offload")["bytes"] >= LARGE_MIB * MIB
    logged = lab.lab.daemon_log(SOURCE).read_text(errors="replace")
    assert "goes through files on this node: the program has created memory that cannot be exported" in logged
    lab.ends_well(job)


def test_rank_that_is_larger_than_the_memory_for_images_moves(lab: GpuCluster) -> None:
    """Both nodes may use less memory than the rank has on its GPU. Without holding, it is refused before anything is paused.

    What the rank has never used takes no memory of the machine yet: what it has used looks like its host memory here."""
    job = start(lab, *LARGE, "--idle-mib", str(HUGE_MIB))
    job.await_lines(3)
    try:
        for node in (SOURCE, TARGET):
            image_memory(lab, node, f"{SMALL_MIB}m")
        with configured(lab.cluster, (SOURCE, TARGET), {"hold_device_memory": False}):
            refused = lab.cluster.move(job, TARGET, expect=10)
            assert "image-room: the image needs up to" in refused["reason"]
            assert [phase["name"] for phase in refused["phases"]] == ["preflight"]
            job.await_progress(2)
        moved = lab.cluster.move(job, TARGET)
        assert moved["warnings"] == []
        assert part(moved, "offload")["bytes"] == part(moved, "refill")["bytes"] >= HUGE_MIB * MIB
        lab.ends_well(job)
    finally:
        for node in (SOURCE, TARGET):
            image_memory(lab, node, "90%")


def image_memory(lab: GpuCluster, node: str, size: str) -> None:
    """Sets the size of the file system in memory that has the node's images."""
    inside = ["nsenter", "--target", str(lab.lab.daemon_pid(node)), "--mount"]
    subprocess.run([*inside, "mount", "-o", f"remount,size={size}", "/run"], check=True)


def test_target_that_is_restarted_keeps_nothing_on_its_gpu(lab: GpuCluster) -> None:
    """Its daemon is killed when the rank has its memory there, and does not run yet."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(TARGET, Point.REFILLED, "kill")
    with lab.cluster.begin_move(job, TARGET) as move:
        until("the daemon to die", lambda: lab.lab.daemon_pid(TARGET) is None)
        lab.lab.start_daemon(TARGET)
        move.wait(120)
    job.await_progress(3)
    until("the holders to end", lambda: gone(lab, "snapshotd.holder"))
    until("the GPU of the target to be empty", lambda: lab.used_bytes(TARGET) == 0)
    lab.ends_well(job)


def test_memory_outlives_the_daemon(lab: GpuCluster) -> None:
    """Its daemon is killed while the memory belongs to no process: the next one gives it back."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(SOURCE, Point.CHECKPOINTED, "kill")
    with lab.cluster.begin_move(job, TARGET) as move:
        until("the daemon to die", lambda: lab.lab.daemon_pid(SOURCE) is None)
        assert held(lab)
        lab.lab.start_daemon(SOURCE)
        move.wait(120)
    job.await_progress(3)
    until("the holder to end", lambda: not held(lab))
    lab.cluster.move(job, TARGET)
    lab.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("node", "program"), [(SOURCE, COPIER), (TARGET, FILLER)])
def test_killed_process_that_copies_is_replaced(lab: GpuCluster, node: str, program: str) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED) as asked:
        (copier,) = children(lab, node, program)
        os.kill(copier, signal.SIGKILL)
        until("it to be gone", lambda: not Path(f"/proc/{copier}").exists())
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    lab.ends_well(job)


def ends_well_and_moves_again(lab: GpuCluster, job: Job) -> None:
    """The rank is where it was, or where it was to go."""
    job.await_progress(3)
    until("the holders to end", lambda: gone(lab, "snapshotd.holder"))
    (at,) = {one["at_node"] for one in lab.cluster.ps(job)}
    lab.cluster.move(job, SOURCE if at == TARGET else TARGET)
    lab.ends_well(job)


@pytest.mark.parametrize("point", [Point.OFFLOADED, Point.CHECKPOINTED, Point.FREEZE, Point.STREAM])
def test_killed_holder_is_replaced(lab: GpuCluster, point: Point) -> None:
    """While the memory belongs to no process."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, point) as asked:
        kill(holder_of(lab, SOURCE))
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    assert "which kept device memory, has ended" in lab.lab.daemon_log(SOURCE).read_text(errors="replace")
    ends_well_and_moves_again(lab, job)


@pytest.mark.sampled(1)
def test_killed_holder_and_copier_are_replaced(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, SOURCE, Point.OFFLOADED) as asked:
        for pid in (holder_of(lab, SOURCE), *children(lab, SOURCE, COPIER)):
            kill(pid)
    assert asked.code == 0, f"{asked.answer} {asked.errors}"
    ends_well_and_moves_again(lab, job)


def test_undo_gives_back_what_a_killed_holder_kept(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(TARGET, Point.CUDA_RESTORED, "fail")
    with lab.cluster.moving(job, TARGET, SOURCE, Point.CHECKPOINTED) as asked:
        kill(holder_of(lab, SOURCE))
    assert asked.code == UNDONE, f"{asked.answer} {asked.errors}"
    ends_well_and_moves_again(lab, job)


def test_memory_outlives_first_the_holder_and_then_the_daemon(lab: GpuCluster) -> None:
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(SOURCE, Point.CHECKPOINTED, "wait")
    with lab.cluster.begin_move(job, TARGET) as move:
        until("the memory to belong to no process", lambda: lab.cluster.fired(SOURCE))
        kill(holder_of(lab, SOURCE))
        # It has everything when it is asked, and nobody asks.
        logged = lab.lab.daemon_log(SOURCE)
        until("it to be replaced", lambda: "takes its place" in logged.read_text(errors="replace"))
        lab.lab.kill_daemon(SOURCE)
        lab.lab.start_daemon(SOURCE)
        move.wait(120)
    ends_well_and_moves_again(lab, job)


def test_memory_outlives_first_the_daemon_and_then_the_holder(lab: GpuCluster) -> None:
    """The next daemon has taken duplicates."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(TARGET, Point.RESTORING, "wait")
    with lab.cluster.begin_move(job, TARGET) as move:
        until("the copy to be restored", lambda: lab.cluster.fired(TARGET))
        lab.lab.kill_daemon(SOURCE)
        lab.lab.start_daemon(SOURCE)
        kill(holder_of(lab, SOURCE))
        lab.lab.kill_daemon(TARGET)
        lab.lab.start_daemon(TARGET)
        move.wait(120)
    job.await_progress(3)
    assert {one["at_node"] for one in lab.cluster.ps(job)} == {SOURCE}
    assert "bytes of device memory were handed back" in lab.lab.daemon_log(SOURCE).read_text(errors="replace")
    ends_well_and_moves_again(lab, job)


@pytest.mark.parametrize(
    ("node", "point"),
    [(SOURCE, Point.OFFLOADED), (SOURCE, Point.CHECKPOINTED), (TARGET, Point.RESTORING), (TARGET, Point.CUDA_RESTORED)],
)
def test_holder_that_is_killed_on_the_target_leaves_the_rank_on_its_source(
    lab: GpuCluster, node: str, point: Point
) -> None:
    """While it is filled, and when it has arrived. If it keeps nothing yet, the move succeeds."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    with lab.cluster.moving(job, TARGET, node, point) as asked:
        kill(holder_of(lab, TARGET))
    expected = (0, UNDONE) if point == Point.OFFLOADED else (UNDONE,)
    assert asked.code in expected, f"{asked.answer} {asked.errors}"
    ends_well_and_moves_again(lab, job)


def test_lost_memory_ends_the_rank(lab: GpuCluster) -> None:
    """The daemon, which has duplicates, and the process that keeps it are killed. With the daemon its child ends that copies.

    No process has the memory any more."""
    job = start(lab, *LARGE)
    job.await_lines(5)
    lab.cluster.fault(SOURCE, Point.OFFLOADED, "wait")
    with lab.cluster.begin_move(job, TARGET) as move:
        until("the memory to belong to no process", lambda: lab.cluster.fired(SOURCE))
        copiers, holder = children(lab, SOURCE, COPIER), holder_of(lab, SOURCE)
        lab.lab.kill_daemon(SOURCE)  # first: it would start another holder
        kill(holder)
        until("the copier to end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in copiers))
        lab.lab.start_daemon(SOURCE)
        move.wait(120)
    assert job.finish() != 0
    assert "the process that kept it has ended" in lab.lab.daemon_log(SOURCE).read_text(errors="replace")
