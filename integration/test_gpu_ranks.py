"""GPU ranks move between nodes with stand-in GPUs: the real daemons, CRIU, shim and helper; only the driver is not real.
Their device memory goes with the driver's checkpoint; parked, which is the default, it is in test_parked_ranks.

The same on a real GPU, with torch, is integration/gpu.
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
def device_memory_with_the_driver(lab: GpuCluster) -> None:
    lab.options = ("--device-memory", "driver")


# ---------------------------------------------------------------- moves


@pytest.mark.parametrize(
    "arguments",
    [(), ("--threads", "3", "--pinned-mib", "2"), ("--children", "2"), ("--mib", "64", "--busy-ms", "20")],
    ids=["plain", "threads", "children", "large"],
)
def test_it_moves_and_computes_what_it_would_have(lab: GpuCluster, arguments: tuple[str, ...]) -> None:
    job = lab.job(SOURCE, *arguments)
    job.await_lines(10)
    told = lab.cluster.move(job, TARGET)
    assert [gpu["to"] for gpu in told["gpus"]] == [gpu.uuid for gpu in lab.nodes[TARGET].gpus]
    assert told["device_bytes"] > 16 << 20
    names = [part["name"] for part in told["parts"]]
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
    assert names == expected
    job.await_progress()
    until("the source's GPU to be empty", lambda: lab.used_bytes(SOURCE) == 0)
    until("the job on the target's GPU", lambda: lab.used_bytes(TARGET) > 16 << 20)
    lab.ends_well(job)
    until("the target's GPU to be empty", lambda: lab.used_bytes(TARGET) == 0)


def test_round_three_nodes_and_back(lab: GpuCluster) -> None:
    job = lab.job(SOURCE, "--threads", "2", "--children", "1")
    for to in (OTHER, TARGET, SOURCE, TARGET, OTHER, SOURCE):
        job.await_progress()
        lab.cluster.move(job, to)
    lab.ends_well(job)


def test_nothing_of_the_job_runs_between_lock_and_commit(lab: GpuCluster) -> None:
    """Held at every point from the checkpoint to the outcome, on both sides, it makes no step."""
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
            assert job.lines() == before, f"it ran at {point}"
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        lab.ends_well(job)


def test_a_cpu_rank_costs_no_gpu_question(lab: GpuCluster) -> None:
    for node in (SOURCE, TARGET):  # whoever asks would hang
        for operation in ("state", "lock", "checkpoint"):
            lab.nodes[node].fault(operation, "hang", once=False)
    job = lab.cluster.workload(SOURCE, "chain.py")
    job.await_lines(5)
    told = lab.cluster.move(job, TARGET)
    assert (told["gpus"], told["device_bytes"]) == ([], 0)
    job.await_progress()


# ---------------------------------------------------------------- the choice of a GPU


def test_the_gpu_asked_for(lab: GpuCluster) -> None:
    lab.give(TARGET, *gpus("two", count=3))
    lab.give(SOURCE, *gpus("one", count=1))
    job = lab.job(SOURCE)
    job.await_lines(5)
    done = lab.cluster.migrator("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--gpu", "2", "--json")
    assert done.returncode == 0, done.stderr + lab.cluster.logs()
    assert json.loads(done.stdout)["gpus"][0]["to"] == gpus("two", count=3)[2].uuid
    shown = lab.cluster.ps(job)[0]
    assert shown["gpus"] == [gpus("two", count=3)[2].uuid]
    lab.ends_well(job)


def test_two_moves_to_a_node_get_different_gpus(lab: GpuCluster) -> None:
    lab.give(TARGET, *gpus("pair", count=2))
    until("its daemon sees them", lambda: len(lab.shown(TARGET)["gpus"]) == 2)  # what it saw is kept for a second
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


# ---------------------------------------------------------------- refusals, before anything is locked


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
def test_refused_by_name(
    lab: GpuCluster, arguments: tuple[str, ...], node: str, change: dict[str, Any], name: str
) -> None:
    if node:
        change = dict(change)
        lab.nodes[node].driver_version = change.pop("driver_version", lab.nodes[node].driver_version)
        lab.give(node, *(dataclasses.replace(card, **change) for card in lab.nodes[node].gpus))
    lab.nodes[SOURCE].fault("lock", "lose", once=False)  # whoever locks ruins it
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


def test_a_gpu_without_room_is_refused(lab: GpuCluster) -> None:
    job, hog = lab.job(SOURCE), lab.job(TARGET, "--idle-mib", "4000")
    job.await_lines(5)
    until("the GPU is full", lambda: lab.used_bytes(TARGET) > 4000 << 20)
    move = ("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    done = lab.cluster.migrator(*move, "--gpu", "0")  # asked for by name it may be shared, if there is room
    assert done.returncode == REFUSED, f"{done.stdout}{done.stderr}"
    assert "gpu-memory" in json.loads(done.stdout)["reason"]
    assert "gpu-free" in json.loads(lab.cluster.migrator(*move).stdout)["reason"]
    hog.kill()
    until("the GPU is empty", lambda: lab.used_bytes(TARGET) == 0)
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
def test_the_driver_says_no(lab: GpuCluster, node: str, operation: str, action: str) -> None:
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.nodes[node].fault(operation, action, once=operation != "lock")  # which is tried in another order
    told = lab.cluster.move(job, TARGET, expect=UNDONE)
    lab.nodes[node].clear_faults()
    words = {"lock": "did not finish", "checkpoint": "NOT_SUPPORTED", "restore": "memory", "unlock": "UNKNOWN"}
    assert words[operation] in told["reason"] or "lost" in told["reason"], told
    assert told["where"] == "running on source"
    job.await_progress()
    lab.cluster.move(job, TARGET)  # a plain retry succeeds
    lab.ends_well(job)


def test_managed_memory_that_nobody_saw_before(lab: GpuCluster) -> None:
    """The stand-in's has no mapping by which preflight could know it: it warns, the driver says no, and it is undone."""
    job = lab.job(SOURCE, "--managed-mib", "4")
    job.await_lines(5)
    checks = json.loads(
        lab.cluster.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json").stdout
    )
    assert {check["verdict"] for check in checks["checks"] if check["name"] == "gpu-managed-memory"} == {"warn"}
    told = lab.cluster.move(job, TARGET, expect=UNDONE)
    assert "CUDA_ERROR_NOT_SUPPORTED" in told["reason"]
    assert "managed memory" in told["remedy"]
    lab.ends_well(job)


@pytest.mark.sampled(1, per="action")
@pytest.mark.parametrize(("node", "operation"), [(SOURCE, "checkpoint"), (TARGET, "restore")])
@pytest.mark.parametrize("action", ["die", "die-after"])
def test_the_helper_is_killed_in_the_middle(lab: GpuCluster, node: str, operation: str, action: str) -> None:
    """The driver finishes alone, or is asked again: the move goes on."""
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.nodes[node].fault(operation, action)
    lab.cluster.move(job, TARGET)
    lab.ends_well(job)


def test_device_memory_that_cannot_come_back_yet(lab: GpuCluster) -> None:
    """The undo finds the GPU full: it says so, goes on trying, and the job goes on in the end."""
    job = lab.job(SOURCE, "--mib", "256", "--blocks", "1")
    job.await_lines(5)
    lab.nodes[TARGET].fault("restore", "fail:CUDA_ERROR_UNKNOWN")
    with lab.cluster.moving(job, TARGET, SOURCE, Point.CHECKPOINTED) as asked:
        hog = lab.job(SOURCE, "--idle-mib", "3900")
        until("the GPU is full", lambda: lab.used_bytes(SOURCE) > 3900 << 20)
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert asked.answer["where"] == "frozen on source"
    assert "device memory" in asked.answer["reason"]
    waiting = json.loads(lab.cluster.migrator("status", "--json").stdout)["moves"]
    assert any("device memory" in move["waiting_for"] for move in waiting), waiting
    before = job.lines()
    hog.kill()
    until("it goes on", lambda: len(job.lines()) > len(before) + 3)
    lab.ends_well(job)


def test_the_driver_lost_it(lab: GpuCluster) -> None:
    """The rank can never go on: it is ended, whoever started it hears of it, and the error says why."""
    job = lab.job(SOURCE)
    job.await_lines(5)
    lab.nodes[SOURCE].fault("checkpoint", "lose")
    told = lab.cluster.move(job, TARGET, expect=GONE)
    assert "lost" in told["reason"], told
    assert job.finish() == 128 + signal.SIGKILL or job.process.returncode == -signal.SIGKILL


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "point", [Point.PARKED, Point.LOCKED, Point.CHECKPOINTED, Point.FREEZE, Point.DUMPING, Point.STREAM]
)
def test_the_sources_daemon_is_killed(lab: GpuCluster, point: Point) -> None:
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", [Point.CUDA_RESTORED, Point.RESTORED, Point.ACTIVATED])
def test_the_targets_daemon_is_killed(lab: GpuCluster, point: Point) -> None:
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
