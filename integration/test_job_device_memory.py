"""Snapshots of jobs with much device memory: it bypasses the driver's checkpoint, and is saved while the rank goes on.

Daemons, CRIU, shim, holder, copier and stripes are real; only the CUDA driver is fake. Its jobs print the steps of an
undisturbed run.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, SHORT_LEASE, until
from integration.job_commands import ask
from integration.job_device_memory import CONTEXT_MIB, asking, holders, kill, sizes, snapshot_and_rollback, start
from integration.offloads import LARGE_MIB, MIB, UNDONE, children, part
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

ONE, SPARE = "node-1", "spare-1"
COPIER = "snapshotd.holder.copier"


def test_copy_stays_on_the_gpu_and_is_saved_while_the_rank_goes_on(lab: GpuCluster) -> None:
    job = start(lab)
    for node in (ONE, SPARE):  # the second is of a rank that was rolled back
        job.await_progress(3)
        taken = ask(lab.cluster, "snapshot", job.name)
        of = sizes(taken)
        assert LARGE_MIB * MIB <= of["offload"] == of["give-back"] == of["save"], taken
        assert of["checkpoint"] <= CONTEXT_MIB * MIB
        assert "copy-out" not in of
        until("the holders to end", lambda: not holders(lab.cluster))
        job.await_progress(3)
        if node == ONE:
            kill(lab, job)
            back = ask(lab.cluster, "rollback", job.name, "--on", f"0={SPARE}")
        else:
            lab.lab.crash(SPARE)
            back = ask(lab.cluster, "rollback", job.name, "--lost", SPARE)
        assert part(back, "refill")["bytes"] == of["offload"]
    job.await_progress(3)
    lab.lab.boot(SPARE)
    lab.ends_well(job)


@pytest.mark.sampled(1, group="device memory of snapshots")
def test_gpu_without_room_has_its_memory_copied_to_the_host_while_the_rank_waits(lab: GpuCluster) -> None:
    lab.nodes[ONE].change(memory_mib=200)  # contexts of the rank and of the copier, and the memory once
    job = start(lab)
    of = sizes(ask(lab.cluster, "snapshot", job.name))
    assert LARGE_MIB * MIB <= of["offload"] == of["copy-out"] == of["save"]
    assert "give-back" not in of
    snapshot_and_rollback(lab, job)
    lab.ends_well(job)


@pytest.mark.sampled(1, group="device memory of snapshots")
def test_gpu_whose_room_was_taken_since_has_its_memory_copied_to_the_host(lab: GpuCluster) -> None:
    """The rank has its memory again, and cannot allocate what would make it independent of the copy."""
    job = start(lab)
    with asking(lab.cluster, ONE, Point.TAKEN_BACK, "wait", "snapshot", job.name) as asked:
        lab.nodes[ONE].fault("create", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    assert asked.code == 0, f"{asked.answer} {asked.errors} {lab.cluster.logs()}"
    assert "has no room for a copy" in lab.lab.daemon_log(ONE).read_text(errors="replace")
    job.await_progress(3)
    kill(lab, job)
    ask(lab.cluster, "rollback", job.name)
    job.await_progress(3)
    snapshot_and_rollback(lab, job)
    lab.ends_well(job)


@pytest.mark.sampled(1, group="device memory of snapshots")
def test_killed_copier_is_replaced_while_the_rank_goes_on(lab: GpuCluster) -> None:
    job = start(lab)
    with asking(lab.cluster, ONE, Point.SAVING, "wait", "snapshot", job.name) as asked:
        job.await_progress(3)
        (copier,) = children(lab, ONE, COPIER)
        os.kill(copier, signal.SIGKILL)
        until("it to be gone", lambda: not Path(f"/proc/{copier}").exists())
    assert asked.code == 0, f"{asked.answer} {asked.errors} {lab.cluster.logs()}"
    snapshot_and_rollback(lab, job)
    lab.ends_well(job)


@pytest.mark.sampled(1, group="device memory of snapshots")
def test_snapshot_whose_memory_cannot_be_saved_does_not_count(lab: GpuCluster) -> None:
    """The one before it is kept, and the rank goes on."""
    job = start(lab)
    ask(lab.cluster, "snapshot", job.name)
    job.await_progress(3)
    with asking(lab.cluster, ONE, Point.SAVING, "wait", "snapshot", job.name) as asked:
        lab.nodes[ONE].fault("copy", "fail:CUDA_ERROR_UNKNOWN", once=False)
    lab.nodes[ONE].clear_faults()
    assert asked.code == UNDONE, f"{asked.answer} {asked.errors}"
    assert "is not in the image" in asked.answer["reason"]
    job.await_progress(3)
    until("the holders to end", lambda: not holders(lab.cluster))
    kill(lab, job)
    ask(lab.cluster, "rollback", job.name)
    job.await_progress(3)
    lab.ends_well(job)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point",
    [
        Point.OFFLOADED,
        Point.CHECKPOINTED,
        Point.STREAM,
        Point.TAKEN_BACK,
        Point.CONTINUE,
        Point.SAVING,
        Point.SAVED,
    ],
)
def test_daemon_killed_during_a_snapshot_gives_the_memory_back(lab: GpuCluster, point: Point) -> None:
    """Its successor does, from the holder. The snapshot does not count, unless the daemon was killed when it was complete."""
    job = start(lab)
    with asking(lab.cluster, ONE, point, "kill", "snapshot", job.name, *SHORT_LEASE) as asked:
        until("the daemon to die", lambda: lab.lab.daemon_pid(ONE) is None)
        lab.lab.start_daemon(ONE, timeout_s=PATIENCE_S)
    assert asked.code != 0, asked.answer
    job.await_progress(3)
    until("the holders to end", lambda: not holders(lab.cluster))
    snapshot_and_rollback(lab, job)
    lab.ends_well(job)
