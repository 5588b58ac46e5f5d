"""Whole jobs that use GPUs are suspended, resumed, snapshotted and rolled back. Daemons, CRIU, shim and helper are real; only
the CUDA driver is fake. Every step that a job prints is that of an undisturbed run."""

from __future__ import annotations

import os
import signal

import pytest

from integration.configuring import configured
from integration.gpu_nodes import GpuCluster
from integration.harness import until
from integration.job_commands import WHOLE_JOBS, ask
from integration.job_device_memory import CONTEXT_MIB, sizes, snapshot_and_rollback, start
from integration.offloads import LARGE, LARGE_MIB, MIB, UNDONE, part
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO, SPARE = "node-1", "node-2", "spare-1"


@pytest.mark.timeout(900)
def test_gpu_job_is_suspended_resumed_snapshotted_and_rolled_back(lab: GpuCluster) -> None:
    """Of a rank with so little device memory that the driver's checkpoint carries all of it."""
    nodes = lab.cluster
    job = lab.job(ONE, "--threads", "2", "--mib", "16")
    job.await_lines(10)

    lab.nodes[ONE].fault("checkpoint", "fail:CUDA_ERROR_UNKNOWN")
    answer = ask(nodes, "suspend", job.name, expect=UNDONE)
    assert "running, as before" in answer["state"], answer
    job.await_progress(3)

    ask(nodes, "suspend", job.name)
    until("the GPU to be empty", lambda: lab.used_bytes(ONE) == 0)
    assert nodes.processes_of(f"{job.name}.end") == []
    ask(nodes, "resume", job.name, "--on", f"0={SPARE}")
    job.await_progress(3)
    until("the job on the GPU of the spare", lambda: lab.used_bytes(SPARE) > 16 << 20)

    nodes.fault(SPARE, Point.CHECKPOINTED, "fail")
    answer = ask(nodes, "snapshot", job.name, expect=UNDONE)
    assert "running, as before" in answer["state"], answer
    job.await_progress(3)
    ask(nodes, "snapshot", job.name)
    assert lab.used_bytes(SPARE) > 16 << 20, "the rank goes on where it is"
    job.await_progress(3)
    (rank,) = nodes.processes_of(f"{job.name}.end")
    os.kill(rank, signal.SIGKILL)
    ask(nodes, "rollback", job.name)
    job.await_progress(3)
    assert job.process.poll() is None, "the launcher notices nothing"
    assert lab.used_bytes(SPARE) > 16 << 20

    nodes.lab.crash(SPARE)
    answer = ask(nodes, "rollback", job.name, "--lost", SPARE)
    assert [rank["node"] for rank in answer["ranks"]] != [SPARE]
    job.await_progress(3)
    nodes.lab.boot(SPARE)
    lab.ends_well(job)


@pytest.mark.timeout(900)
def test_device_memory_of_a_suspended_job_is_stored_in_stripes(lab: GpuCluster) -> None:
    """The driver's checkpoint carries nothing but what the driver itself needs."""
    nodes = lab.cluster
    job = lab.job(ONE, *LARGE, "--threads", "1")
    job.await_lines(5)

    for point in (Point.OFFLOADED, Point.STREAM):
        nodes.fault(ONE, point, "fail")
        answer = ask(nodes, "suspend", job.name, expect=UNDONE)
        assert "running, as before" in answer["state"], answer
        job.await_progress(3)

    suspended = ask(nodes, "suspend", job.name)
    assert part(suspended, "offload")["bytes"] >= LARGE_MIB * MIB
    assert part(suspended, "checkpoint")["bytes"] <= CONTEXT_MIB * MIB
    assert suspended["warnings"] == []
    until("the GPU to be empty", lambda: lab.used_bytes(ONE) == 0)

    nodes.fault(SPARE, Point.REFILLED, "fail")
    answer = ask(nodes, "resume", job.name, "--on", f"0={SPARE}", expect=UNDONE)
    assert "its images are whole" in answer["state"], answer
    resumed = ask(nodes, "resume", job.name, "--on", f"0={SPARE}")
    assert part(resumed, "refill")["bytes"] == part(suspended, "offload")["bytes"]
    job.await_progress(3)
    lab.ends_well(job)


@pytest.mark.timeout(900)
def test_files_take_the_memory_where_it_cannot_be_handed_over(lab: GpuCluster) -> None:
    """With `hold_device_memory` off: the shim copies it while the rank waits, past the driver's checkpoint."""
    with configured(lab.cluster, (ONE, SPARE), {"hold_device_memory": False}):
        job = start(lab)
        of = sizes(ask(lab.cluster, "snapshot", job.name))
        assert LARGE_MIB * MIB <= of["offload"] == of["save"]
        assert of["checkpoint"] <= CONTEXT_MIB * MIB
        assert "give-back" not in of
        snapshot_and_rollback(lab, job)
        lab.ends_well(job)
