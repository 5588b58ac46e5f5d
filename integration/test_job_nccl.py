"""Whole NCCL jobs are suspended, resumed, snapshotted and rolled back. Daemons, CRIU and shim are real; NCCL is a fake, as
is the CUDA driver where ranks have device memory. What every rank prints is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import MIGRATOR, PATIENCE_S, Cluster, until
from integration.job_commands import ONE_OF_A_KIND, WHOLE_JOBS, ask
from integration.nccl_nodes import NcclJob, unsettled
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO, THREE, SPARE = "node-1", "node-2", "node-3", "spare-1"
UNDONE = 11


def _processes(nodes: Cluster, job: NcclJob) -> list[int]:
    return nodes.processes_of(str(job.meeting))


def _rolls_back(nodes: Cluster, name: str) -> bool:
    return nodes.migrator("job", "rollback", name, timeout_s=2 * PATIENCE_S).returncode == 0


@ONE_OF_A_KIND
@pytest.mark.timeout(1200)
def test_nccl_job_is_suspended_resumed_snapshotted_and_rolled_back(nodes: Cluster) -> None:
    job = NcclJob(nodes, [ONE, ONE, TWO, TWO], shape="pairs")
    name = job.ranks[0].name
    job.await_lines(5)

    nodes.fault(TWO, Point.FREEZE, "fail")
    answer = ask(nodes, "suspend", name, expect=UNDONE)
    assert answer["state"] == "running, as before", answer
    job.await_progress()

    answer = ask(nodes, "suspend", name)
    assert {"quiesce", "detach"} <= {phase["name"] for phase in answer["phases"]}
    assert _processes(nodes, job) == []
    ask(nodes, "resume", name, "--on", f"1={SPARE}", "--on", f"2={ONE}")
    job.await_progress()

    nodes.fault(TWO, Point.ATTACHING, "kill")  # a daemon dies when the ranks have gone on behind their gates
    answer = ask(nodes, "snapshot", name, expect=UNDONE)
    assert answer["state"].startswith("running, as before"), answer
    nodes.lab.start_daemon(TWO, timeout_s=PATIENCE_S)
    job.await_progress()
    until("the coordinator to settle its record", lambda: not unsettled(nodes))
    answer = ask(nodes, "snapshot", name)
    assert {"quiesce", "detach", "reattach"} <= {phase["name"] for phase in answer["phases"]}
    job.await_progress()
    os.kill(_processes(nodes, job)[0], signal.SIGKILL)
    nodes.fault(SPARE, Point.ATTACHING, "kill")  # the first attempt to resume fails
    ask(nodes, "rollback", name, expect=UNDONE)
    nodes.lab.start_daemon(SPARE, timeout_s=PATIENCE_S)
    until("the second attempt, when the first is cleaned up", lambda: _rolls_back(nodes, name), 4 * PATIENCE_S)
    job.await_progress()
    assert all(rank.process.poll() is None for rank in job.ranks), "the launchers notice nothing"

    nodes.lab.crash(SPARE)
    ask(nodes, "rollback", name, "--lost", SPARE)
    job.await_progress()
    nodes.lab.boot(SPARE)
    assert len(_processes(nodes, job)) == 4
    until(f"all gates to be forgotten\n{nodes.logs()}", lambda: not unsettled(nodes))
    job.ends_well(failed_once=True)  # on a busy machine others notice the loss before the rollback


@pytest.mark.sampled(1, group="whole NCCL jobs")
@pytest.mark.timeout(1200)
def test_tensor_pipeline_and_data_parallel_job_is_rolled_back_after_two_ranks_were_killed(wide: Cluster) -> None:
    """Eight ranks in eight communicators and more, on three nodes; one of them comes back on another node."""
    job = NcclJob(wide, [ONE, ONE, ONE, TWO, TWO, TWO, THREE, THREE], shape="grid")
    name = job.ranks[0].name
    job.await_lines(3)
    ask(wide, "snapshot", name)
    job.await_progress()
    for pid in _processes(wide, job)[:2]:
        os.kill(pid, signal.SIGKILL)
    answer = ask(wide, "rollback", name, "--on", f"7={SPARE}")
    assert {rank["rank"]: rank["node"] for rank in answer["ranks"]}[7] == SPARE
    job.await_progress()
    assert len(_processes(wide, job)) == 8
    job.ends_well(failed_once=True)  # on a busy machine others notice the loss before the rollback


@pytest.mark.sampled(1, group="whole NCCL jobs")
@pytest.mark.timeout(1200)
def test_nccl_job_with_device_memory_is_rolled_back_after_a_rank_was_killed_during_a_snapshot(lab: GpuCluster) -> None:
    """The snapshot is undone, and the one before it is kept. The other rank gets NCCL's errors; its failure is held back."""
    nodes = lab.cluster
    job = NcclJob(nodes, [ONE, TWO], gpus=lab.nodes, device_mib=8, buffer_mib=1)
    name = job.ranks[0].name
    job.await_lines(3)
    lab.nodes[TWO].fault("checkpoint", "fail:CUDA_ERROR_UNKNOWN")
    assert ask(nodes, "snapshot", name, expect=UNDONE)["state"].startswith("running, as before")
    job.await_progress()
    ask(nodes, "snapshot", name)
    job.await_progress()
    nodes.fault(ONE, Point.BEFORE_ATTACH, "wait")
    command = [*MIGRATOR, "job", "snapshot", name, "--json"]
    with subprocess.Popen(command, env=nodes.environment(), stdout=subprocess.PIPE, text=True) as asked:
        until("the ranks to go on behind their gates", lambda: nodes.fired(ONE) or asked.poll() is not None)
        assert asked.poll() is None, nodes.logs()
        os.kill(_processes(nodes, job)[0], signal.SIGKILL)
        (nodes.run_dir(ONE) / f"{Point.BEFORE_ATTACH}.go").touch()
        out, _ = asked.communicate(timeout=2 * PATIENCE_S)
    assert asked.returncode == UNDONE, f"{out}\n{nodes.logs()}"
    assert "never built again" in json.loads(out)["reason"], out
    ask(nodes, "rollback", name, "--on", f"1={SPARE}")
    job.await_progress()
    until("rank 1 on the GPU of the spare", lambda: lab.used_bytes(SPARE) > 8 << 20)
    job.ends_well(failed_once=True)
