"""GPU ranks move between nodes with fake GPUs. Daemons, CRIU, shim and helper are real; only the driver is fake.

Here the driver's checkpoint carries the device memory. Offloaded memory, the default, is in test_offload.py. The same on
a real GPU, with torch, is in integration/gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
from typing import Any

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, SHORT_LEASE, until
from snapshotd.runtime.faults import Point
from tests.fakes.cuda_fake import gpus

SOURCE, OTHER, TARGET = "node-1", "node-2", "spare-1"
REFUSED, UNDONE, GONE = 10, 11, 21


@pytest.fixture(autouse=True)
def leave_device_memory_to_the_driver(lab: GpuCluster) -> None:
    lab.options = ("--device-memory", "driver")


# ---------------------------------------------------------------- moves


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [(), ("--threads", "3", "--pinned-mib", "2"), ("--children", "2"), ("--mib", "64", "--busy-ms", "20")],
    ids=["plain", "threads", "children", "large"],
)
def test_moved_job_computes_what_an_unmoved_one_does(lab: GpuCluster, arguments: tuple[str, ...]) -> None:
    job = lab.job(SOURCE, *arguments)
    job.await_lines(10)
    result = lab.cluster.move(job, TARGET)
    assert [gpu["to"] for gpu in result["gpus"]] == [gpu.uuid for gpu in lab.nodes[TARGET].gpus]
    assert result["device_bytes"] > 16 << 20
    names = [part["name"] for part in result["parts"]]
    expected = [
        "empty-cache",
        "park",
        "lock",
        "checkpoint",
        "criu-dump",
        "stream",
        "criu-restore",
        "cuda-restore",
        "unlock",
    ]
    if "place-memory" in names:  # of a rank with large memory
        expected.insert(expected.index("cuda-restore"), "place-memory")
    assert names == expected
    job.await_progress()
    until("the source's GPU to be empty", lambda: lab.used_bytes(SOURCE) == 0)
    until("the job on the target's GPU", lambda: lab.used_bytes(TARGET) > 16 << 20)
    lab.ends_well(job)
    until("the target's GPU to be empty", lambda: lab.used_bytes(TARGET) == 0)


@pytest.mark.sampled(1, group="long journeys")
def test_job_moves_around_three_nodes_twice(lab: GpuCluster) -> None:
    job = lab.job(SOURCE, "--threads", "2", "--children", "1")
    for to in (OTHER, TARGET, SOURCE, TARGET, OTHER, SOURCE):
        job.await_progress()
        lab.cluster.move(job, to)
    lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_job_does_not_run_between_lock_and_commit(lab: GpuCluster) -> None:
    """At each point from the checkpoint to the outcome, on both nodes, the job makes no step."""
    for node, point in (
        (SOURCE, Point.CHECKPOINTED),
        (TARGET, Point.CUDA_RESTORED),
        (TARGET, Point.RESTORED),
        (SOURCE, Point.BEFORE_COMMIT),
    ):
        job = lab.job(SOURCE, "--threads", "2", pace_s=0.01)
        job.await_lines(10)
        with lab.cluster.moving(job, TARGET, node, point) as asked:
            before = job.lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(1.0)
            assert job.lines() == before, f"the job ran at {point}"
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_gpu_driver_is_not_called_for_a_cpu_rank(lab: GpuCluster) -> None:
    for node in (SOURCE, TARGET):  # a call would hang
        for operation in ("state", "lock", "checkpoint"):
            lab.nodes[node].fault(operation, "hang", once=False)
    job = lab.cluster.workload(SOURCE, "chain.py")
    job.await_lines(5)
    result = lab.cluster.move(job, TARGET)
    assert (result["gpus"], result["device_bytes"]) == ([], 0)
    job.await_progress()


# ---------------------------------------------------------------- choice of a GPU


@pytest.mark.sampled(3, group="GPU ranks")
def test_rank_gets_the_requested_gpu(lab: GpuCluster) -> None:
    lab.give(TARGET, *gpus("two", count=3))
    lab.give(SOURCE, *gpus("one", count=1))
    # A GPU that is missed only after the job has started could be one of the job's.
    wanted = [gpus("one", count=1)[0].uuid]
    until("the daemon to see it", lambda: [gpu["uuid"] for gpu in lab.shown(SOURCE)["gpus"]] == wanted)
    job = lab.job(SOURCE)
    job.await_lines(5)
    done = lab.cluster.migrator("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--gpu", "2", "--json")
    assert done.returncode == 0, done.stderr + lab.cluster.logs()
    assert json.loads(done.stdout)["gpus"][0]["to"] == gpus("two", count=3)[2].uuid
    shown = lab.cluster.ps(job)[0]
    assert shown["gpus"] == [gpus("two", count=3)[2].uuid]
    lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_concurrent_moves_to_a_node_get_different_gpus(lab: GpuCluster) -> None:
    lab.give(TARGET, *gpus("pair", count=2))
    until("the daemon to see them", lambda: len(lab.shown(TARGET)["gpus"]) == 2)
    jobs = [lab.job(node) for node in (SOURCE, OTHER)]
    for job in jobs:
        job.await_lines(5)
    with lab.cluster.moving(jobs[0], TARGET, SOURCE, Point.CHECKPOINTED) as first:
        reserved = json.loads(lab.cluster.migrator("nodes", "--json").stdout)["nodes"]
        marks = [gpu["reserved_for"] for node in reserved if node["name"] == TARGET for gpu in node["gpus"]]
        assert len([mark for mark in marks if mark]) == 1
        second = lab.cluster.move(jobs[1], TARGET)
    assert first.code == 0
    assert first.answer["gpus"][0]["to"] != second["gpus"][0]["to"]


# ---------------------------------------------------------------- refusals before the driver is locked


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "node", "change", "name"),
    [
        (("--export",), "", {}, "gpu-ipc"),
        ((), SOURCE, {"driver_version": "565.57.01"}, "gpu-driver"),
        ((), TARGET, {"driver_version": "580.65.06"}, "gpu-driver"),
        ((), TARGET, {"name": "NVIDIA A100"}, "gpu-chip"),
        ((), TARGET, {"mig": True}, "gpu-mig"),
        ((), SOURCE, {"mps": True}, "gpu-mps"),
    ],
)
def test_preflight_refuses_before_the_driver_is_locked(
    lab: GpuCluster, arguments: tuple[str, ...], node: str, change: dict[str, Any], name: str
) -> None:
    if node:
        change = dict(change)
        lab.nodes[node].driver_version = change.pop("driver_version", lab.nodes[node].driver_version)
        lab.give(node, *(dataclasses.replace(card, **change) for card in lab.nodes[node].gpus))
    lab.nodes[SOURCE].fault("lock", "lose", once=False)  # locking would destroy the process
    job = lab.job(SOURCE, *arguments)
    job.await_lines(5)
    rank = ("--rank", "0", "--job", job.name, "--to", TARGET)
    # A daemon keeps for a second what it has seen of its GPUs.
    until("preflight to see it", lambda: name in lab.cluster.migrator("check", *rank).stdout)
    done = lab.cluster.migrator("move", *rank, "--json")
    assert done.returncode == REFUSED, f"{done.stdout}{done.stderr}{lab.cluster.logs()}"
    assert name in json.loads(done.stdout)["reason"]
    assert "remedy" in json.loads(done.stdout)["reason"]
    job.await_progress()


@pytest.mark.sampled(3, group="GPU ranks")
def test_gpu_without_free_memory_is_refused(lab: GpuCluster) -> None:
    job, hog = lab.job(SOURCE), lab.job(TARGET, "--idle-mib", "4000")
    job.await_lines(5)
    until("the GPU to be full", lambda: lab.used_bytes(TARGET) > 4000 << 20)
    move = ("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    done = lab.cluster.migrator(*move, "--gpu", "0")  # a GPU requested by name may be shared, if it has room
    assert done.returncode == REFUSED, f"{done.stdout}{done.stderr}"
    assert "gpu-memory" in json.loads(done.stdout)["reason"]
    assert "gpu-free" in json.loads(lab.cluster.migrator(*move).stdout)["reason"]
    hog.kill()
    until("the GPU to be empty", lambda: lab.used_bytes(TARGET) == 0)
    lab.cluster.move(job, TARGET)
    job.await_progress()


# ---------------------------------------------------------------- undo


@pytest.mark.sampled(1, per="operation")
@pytest.mark.parametrize(
    ("node", "operation", "action"),
    [
        (SOURCE, "lock", "fail:CUDA_ERROR_NOT_READY"),
        (SOURCE, "checkpoint", "fail:CUDA_ERROR_NOT_SUPPORTED"),
        (TARGET, "restore", "fail:CUDA_ERROR_OUT_OF_MEMORY"),
        (TARGET, "restore", "lose"),
        (TARGET, "unlock", "fail:CUDA_ERROR_UNKNOWN"),
    ],
)
def test_driver_error_is_undone_and_a_retry_succeeds(lab: GpuCluster, node: str, operation: str, action: str) -> None:
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.nodes[node].fault(operation, action, once=operation != "lock")  # lock is tried twice
    result = lab.cluster.move(job, TARGET, expect=UNDONE)
    lab.nodes[node].clear_faults()
    expected = {"lock": "did not finish", "checkpoint": "NOT_SUPPORTED", "restore": "memory", "unlock": "UNKNOWN"}
    assert expected[operation] in result["reason"] or "lost" in result["reason"], result
    assert result["where"] == "running on source"
    job.await_progress()
    lab.cluster.move(job, TARGET)
    lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_managed_memory_that_preflight_cannot_see_is_undone(lab: GpuCluster) -> None:
    """The fake's managed memory has no mapping that preflight could find. Preflight warns, and the driver fails."""
    job = lab.job(SOURCE, "--managed-mib", "4")
    job.await_lines(5)
    checks = json.loads(
        lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json").stdout
    )
    assert {check["verdict"] for check in checks["checks"] if check["name"] == "gpu-managed-memory"} == {"warn"}
    result = lab.cluster.move(job, TARGET, expect=UNDONE)
    assert "CUDA_ERROR_NOT_SUPPORTED" in result["reason"]
    assert "managed memory" in result["remedy"]
    lab.ends_well(job)


@pytest.mark.sampled(1, per="action")
@pytest.mark.parametrize(("node", "operation"), [(SOURCE, "checkpoint"), (TARGET, "restore")])
@pytest.mark.parametrize("action", ["die", "die-after"])
def test_killed_helper_does_not_stop_the_move(lab: GpuCluster, node: str, operation: str, action: str) -> None:
    """The driver finishes alone or is called again, and the move continues."""
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.nodes[node].fault(operation, action)
    lab.cluster.move(job, TARGET)
    lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_rank_waits_frozen_until_its_gpu_has_room(lab: GpuCluster) -> None:
    """The undo finds the GPU full. It reports that and retries, and the job continues once there is room."""
    job = lab.job(SOURCE, "--mib", "256", "--blocks", "1")
    job.await_lines(5)
    lab.nodes[TARGET].fault("restore", "fail:CUDA_ERROR_UNKNOWN")
    with lab.cluster.moving(job, TARGET, SOURCE, Point.CHECKPOINTED) as asked:
        hog = lab.job(SOURCE, "--idle-mib", "3900")
        until("the GPU to be full", lambda: lab.used_bytes(SOURCE) > 3900 << 20)
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert asked.answer["where"] == "frozen on source"
    assert "device memory" in asked.answer["reason"]

    def says_why() -> bool:
        """Not at every moment: while it tries again, it waits for nothing."""
        waiting = json.loads(lab.cluster.migrator("status", "--json").stdout)["moves"]
        return any("device memory" in move["waiting_for"] for move in waiting)

    until("status to say what the rank waits for", says_why)
    before = job.lines()
    hog.kill()
    until("the rank to continue", lambda: len(job.lines()) > len(before) + 3)
    lab.ends_well(job)


@pytest.mark.sampled(3, group="GPU ranks")
def test_rank_is_ended_if_the_driver_loses_its_memory(lab: GpuCluster) -> None:
    """The rank cannot continue: it is ended, its launcher sees that, and the error gives the reason."""
    job = lab.job(SOURCE)
    job.await_lines(5)
    lab.nodes[SOURCE].fault("checkpoint", "lose")
    result = lab.cluster.move(job, TARGET, expect=GONE)
    assert "lost" in result["reason"], result
    assert job.finish() == 128 + signal.SIGKILL or job.process.returncode == -signal.SIGKILL


@pytest.mark.sampled(2, cover="point")
@pytest.mark.parametrize(
    "point", [Point.PARKED, Point.LOCKED, Point.CHECKPOINTED, Point.FREEZE, Point.DUMPING, Point.STREAM]
)
def test_source_daemon_killed_is_undone(lab: GpuCluster, point: Point) -> None:
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.cluster.fault(SOURCE, point, "kill")
    with lab.cluster.begin_move(job, TARGET, more=SHORT_LEASE) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(SOURCE) is None)
        lab.lab.start_daemon(SOURCE)
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode == UNDONE, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress()
    lab.ends_well(job)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.CUDA_RESTORED, Point.RESTORED, Point.ACTIVATED])
def test_target_daemon_killed_does_not_harm_the_job(lab: GpuCluster, point: Point) -> None:
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.cluster.fault(TARGET, point, "kill")
    with lab.cluster.begin_move(job, TARGET, more=SHORT_LEASE) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(TARGET) is None)
        lab.lab.start_daemon(TARGET)
        out, errors = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode in {0, UNDONE}, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress()
    lab.ends_well(job)
