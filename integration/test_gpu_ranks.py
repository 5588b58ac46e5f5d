"""GPU ranks move between nodes with stand-in GPUs: the real daemons, CRIU, shim and helper; only the driver is not real.
Their device memory goes with the driver's checkpoint; parked, which is the default, it is in test_parked_ranks.

The same on a real GPU, with torch, is integration/gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.gpu_nodes import STEPS, GpuCluster
from integration.harness import Job, cluster, until
from snapshotd.runtime.faults import Point
from tests.fakes.cuda_fake import GpuNode, gpus

pytestmark = pytest.mark.timeout(120)

SOURCE, OTHER, TARGET = "node-1", "node-2", "spare-1"
REFUSED, UNDONE, GONE = 10, 11, 21


@pytest.fixture(scope="module")
def made() -> Iterator[GpuCluster]:
    folder = Path(__file__).parent / ".work" / "gpu-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "gpus") as nodes:
        yield GpuCluster(nodes, folder / "nodes", ["--device-memory", "driver"])


@pytest.fixture
def lab(made: GpuCluster) -> Iterator[GpuCluster]:
    yield made
    made.reset()


def uninterrupted(lab: GpuCluster, folder: Path, *arguments: str, steps: int = 120) -> str:
    """What the job prints on a GPU of its own, without a move."""
    alone = GpuNode(folder / "alone", gpus("alone"))
    command = [*STEPS, "--steps", str(steps), "--pace-s", "0", *arguments]
    done = subprocess.run(command, env={**os.environ, **alone.environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends_well(lab: GpuCluster, job: Job, folder: Path, *arguments: str, steps: int = 120) -> None:
    assert job.finish(60) == 0, f"{job.text()[-500:]}\n{lab.cluster.logs()}"
    assert job.text() == uninterrupted(lab, folder, *arguments, steps=steps)
    until("nothing of it is left", lambda: not lab.cluster.leftovers(), 20)


def gpu_uses(lab: GpuCluster, node: str) -> list[int]:
    """How much memory is in use on a node's GPUs, as its daemon says."""
    return [gpu["memory_bytes"] - gpu["memory_free_bytes"] for gpu in lab.shown(node)["gpus"]]


# ---------------------------------------------------------------- moves


@pytest.mark.parametrize(
    "arguments",
    [(), ("--threads", "3", "--pinned-mib", "2"), ("--children", "2"), ("--mib", "64", "--busy-ms", "20")],
    ids=["plain", "threads", "children", "large"],
)
def test_it_moves_and_computes_what_it_would_have(lab: GpuCluster, tmp_path: Path, arguments: tuple[str, ...]) -> None:
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
    assert gpu_uses(lab, SOURCE) == [0]
    assert gpu_uses(lab, TARGET)[0] > 16 << 20
    ends_well(lab, job, tmp_path, *arguments)
    assert gpu_uses(lab, TARGET) == [0]


def test_round_three_nodes_and_back(lab: GpuCluster, tmp_path: Path) -> None:
    job = lab.job(SOURCE, "--threads", "2", "--children", "1", steps=300)
    for to in (OTHER, TARGET, SOURCE, TARGET, OTHER, SOURCE):
        job.await_progress()
        lab.cluster.move(job, to)
    ends_well(lab, job, tmp_path, "--threads", "2", "--children", "1", steps=300)


def test_nothing_of_the_job_runs_between_lock_and_commit(lab: GpuCluster, tmp_path: Path) -> None:
    """Held at every point from the checkpoint to the outcome, on both sides, it makes no step."""
    for node, point in (
        (SOURCE, Point.CHECKPOINTED),
        (TARGET, Point.CUDA_RESTORED),
        (TARGET, Point.RESTORED),
        (SOURCE, Point.BEFORE_COMMIT),
    ):
        job = lab.job(SOURCE, "--threads", "2", steps=120, pace_s=0.01)
        job.await_lines(10)
        with lab.cluster.moving(job, TARGET, node, point) as asked:
            before = job.lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(1.0)
            assert job.lines() == before, f"it ran at {point}"
        assert asked.code == 0, f"{asked.answer} {asked.errors}"
        ends_well(lab, job, tmp_path, "--threads", "2", steps=120)


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


def test_the_gpu_asked_for(lab: GpuCluster, tmp_path: Path) -> None:
    lab.give(TARGET, *gpus("two", count=3))
    lab.give(SOURCE, *gpus("one", count=1))
    job = lab.job(SOURCE)
    job.await_lines(5)
    done = lab.cluster.migrator("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--gpu", "2", "--json")
    assert done.returncode == 0, done.stderr + lab.cluster.logs()
    assert json.loads(done.stdout)["gpus"][0]["to"] == gpus("two", count=3)[2].uuid
    shown = lab.cluster.ps(job)[0]
    assert shown["gpus"] == [gpus("two", count=3)[2].uuid]
    ends_well(lab, job, tmp_path)


def test_two_moves_to_a_node_get_different_gpus(lab: GpuCluster) -> None:
    lab.give(TARGET, *gpus("pair", count=2))
    until("its daemon sees them", lambda: len(lab.shown(TARGET)["gpus"]) == 2)  # what it saw is kept for a second
    jobs = [lab.job(node, steps=2000) for node in (SOURCE, OTHER)]
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
        until("its daemon sees it", lambda: lab.shown(node)["driver_version"] == lab.nodes[node].driver_version)
        time.sleep(1.1)  # what was seen of the GPUs is kept for a second
    lab.nodes[SOURCE].fault("lock", "lose", once=False)  # whoever locks ruins it
    job = lab.job(SOURCE, *arguments, steps=2000)
    job.await_lines(5)
    done = lab.cluster.migrator("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    assert done.returncode == REFUSED, f"{done.stdout}{done.stderr}{lab.cluster.logs()}"
    assert name in json.loads(done.stdout)["reason"]
    assert "remedy" in json.loads(done.stdout)["reason"]
    job.await_progress()


def test_a_gpu_without_room_is_refused(lab: GpuCluster) -> None:
    job, hog = lab.job(SOURCE, steps=2000), lab.job(TARGET, "--mib", "4000", "--blocks", "1", steps=1, pace_s=60)
    job.await_lines(5)
    until("the GPU is full", lambda: gpu_uses(lab, TARGET)[0] > 4000 << 20)
    move = ("move", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    done = lab.cluster.migrator(*move, "--gpu", "0")  # asked for by name it may be shared, if there is room
    assert done.returncode == REFUSED, f"{done.stdout}{done.stderr}"
    assert "gpu-memory" in json.loads(done.stdout)["reason"]
    assert "gpu-free" in json.loads(lab.cluster.migrator(*move).stdout)["reason"]
    hog.kill()
    until("the GPU is empty", lambda: gpu_uses(lab, TARGET)[0] == 0)
    lab.cluster.move(job, TARGET)
    job.await_progress()


# ---------------------------------------------------------------- undo


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
def test_the_driver_says_no(lab: GpuCluster, tmp_path: Path, node: str, operation: str, action: str) -> None:
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
    ends_well(lab, job, tmp_path, "--threads", "2")


def test_managed_memory_that_nobody_saw_before(lab: GpuCluster, tmp_path: Path) -> None:
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
    ends_well(lab, job, tmp_path, "--managed-mib", "4")


@pytest.mark.parametrize(("node", "operation"), [(SOURCE, "checkpoint"), (TARGET, "restore")])
@pytest.mark.parametrize("action", ["die", "die-after"])
def test_the_helper_is_killed_in_the_middle(
    lab: GpuCluster, tmp_path: Path, node: str, operation: str, action: str
) -> None:
    """The driver finishes alone, or is asked again: the move goes on."""
    job = lab.job(SOURCE, "--threads", "2")
    job.await_lines(5)
    lab.nodes[node].fault(operation, action)
    lab.cluster.move(job, TARGET)
    ends_well(lab, job, tmp_path, "--threads", "2")


def test_device_memory_that_cannot_come_back_yet(lab: GpuCluster, tmp_path: Path) -> None:
    """The undo finds the GPU full: it says so, goes on trying, and the job goes on in the end."""
    job = lab.job(SOURCE, "--mib", "256", "--blocks", "1", steps=25)
    job.await_lines(5)
    lab.nodes[TARGET].fault("restore", "fail:CUDA_ERROR_UNKNOWN")
    with lab.cluster.moving(job, TARGET, SOURCE, Point.CHECKPOINTED) as asked:
        hog = lab.job(SOURCE, "--mib", "3900", "--blocks", "1", steps=1, pace_s=60)
        until("the GPU is full", lambda: gpu_uses(lab, SOURCE)[0] > 3900 << 20)
    assert asked.code == UNDONE, f"{asked.answer}{asked.errors}"
    assert asked.answer["where"] == "frozen on source"
    assert "device memory" in asked.answer["reason"]
    waiting = json.loads(lab.cluster.migrator("status", "--json").stdout)["moves"]
    assert any("device memory" in move["waiting_for"] for move in waiting), waiting
    before = job.lines()
    hog.kill()
    until("it goes on", lambda: len(job.lines()) > len(before) + 3)
    ends_well(lab, job, tmp_path, "--mib", "256", "--blocks", "1", steps=25)


def test_the_driver_lost_it(lab: GpuCluster) -> None:
    """The rank can never go on: it is ended, whoever started it hears of it, and the error says why."""
    job = lab.job(SOURCE)
    job.await_lines(5)
    lab.nodes[SOURCE].fault("checkpoint", "lose")
    told = lab.cluster.move(job, TARGET, expect=GONE)
    assert "lost" in told["reason"], told
    assert job.finish(30) == 128 + signal.SIGKILL or job.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "point", [Point.PARKED, Point.LOCKED, Point.CHECKPOINTED, Point.FREEZE, Point.DUMPING, Point.STREAM]
)
def test_the_sources_daemon_is_killed(lab: GpuCluster, tmp_path: Path, point: Point) -> None:
    job = lab.job(SOURCE, "--threads", "2", steps=200)
    job.await_lines(5)
    lab.cluster.fault(SOURCE, point, "kill")
    with lab.cluster.begin_move(job, TARGET, more=("--lease", "2")) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(SOURCE) is None)
        lab.lab.start_daemon(SOURCE)
        out, errors = asked.communicate(timeout=60)
    assert asked.returncode == UNDONE, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress()
    ends_well(lab, job, tmp_path, "--threads", "2", steps=200)


@pytest.mark.parametrize("point", [Point.CUDA_RESTORED, Point.RESTORED, Point.ACTIVATED])
def test_the_targets_daemon_is_killed(lab: GpuCluster, tmp_path: Path, point: Point) -> None:
    job = lab.job(SOURCE, "--threads", "2", steps=200)
    job.await_lines(5)
    lab.cluster.fault(TARGET, point, "kill")
    with lab.cluster.begin_move(job, TARGET, more=("--lease", "2")) as asked:
        until("the fault", lambda: lab.lab.daemon_pid(TARGET) is None)
        lab.lab.start_daemon(TARGET)
        out, errors = asked.communicate(timeout=60)
    assert asked.returncode in {0, UNDONE}, f"{out}{errors}{lab.cluster.logs()}"
    job.await_progress()
    ends_well(lab, job, tmp_path, "--threads", "2", steps=200)
