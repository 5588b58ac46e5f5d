"""Device memory that stays on the GPU until it is sent (`hold_device_memory`), on a real GPU.

Source and target share one GPU here, so it needs room for the rank twice. `SNAPSHOT_GPU_HOLD_GIB` sets the size of the job.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.gpu.gpu_jobs import (
    GIB,
    SOURCE,
    STEPS,
    TARGET,
    Training,
    Undisturbed,
    hold_device_memory,
    measured,
    needs_cuda,
    record,
    undisturbed_runs,
)
from integration.harness import Cluster, until
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500), needs_cuda()]

FOLDER = Path(__file__).parents[1] / ".work" / "gpu"
LARGE_GIB = os.environ.get("SNAPSHOT_GPU_HOLD_GIB", "8")
LARGE = ("--gib", LARGE_GIB, "--steps", str(2 * STEPS))
UNDONE = 11


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with undisturbed_runs(FOLDER) as runs:
        runs.want(LARGE)
        yield runs


@pytest.fixture
def holding(nodes: Cluster) -> Iterator[Cluster]:
    hold_device_memory(nodes, (SOURCE, TARGET), on=True)
    yield nodes
    hold_device_memory(nodes, (SOURCE, TARGET), on=False)


def _used_mib() -> int:
    """What is used of the GPU, by all processes."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])


def test_undone_moves_leave_the_memory_and_nothing_else(holding: Cluster, undisturbed: Undisturbed) -> None:
    """The memory belongs to no process when the source's daemon is killed; its successor gives it back. After that and
    another undone move the job has memory of its own, once: the driver would not checkpoint it otherwise."""
    training = Training.start(holding, "hold-daemon", LARGE, device_memory="offload")
    training.await_moment()
    undisturbed.settled()  # it uses the GPU too
    before_mib = _used_mib()
    holding.fault(SOURCE, Point.CHECKPOINTED, "kill")
    with holding.begin_move(training.job, TARGET) as move:
        until("the daemon to die", lambda: holding.lab.daemon_pid(SOURCE) is None)
        assert holding.processes_of("snapshotd.holder.process")
        holding.lab.start_daemon(SOURCE)
        move.wait(180)
    training.await_progress()
    holding.fault(TARGET, Point.REFILLED, "fail")
    holding.move(training.job, TARGET, expect=UNDONE)
    training.await_progress()
    until("the holder to end", lambda: not holding.processes_of("snapshotd.holder"))
    until("the memory of the copies to be free", lambda: abs(_used_mib() - before_mib) < 256)
    training.move(TARGET)
    training.runs_on(TARGET)
    training.ends_as(undisturbed.want(LARGE))


def test_held_memory_moves_there_and_back_and_is_undone(holding: Cluster, undisturbed: Undisturbed) -> None:
    """One job: an undone move, a move there, and a move back with memory that was created by another process."""
    training = Training.start(holding, "hold", LARGE, device_memory="offload")
    training.await_moment()
    holding.fault(SOURCE, Point.STREAM, "fail")
    undone = holding.move(training.job, TARGET, expect=UNDONE)
    training.await_progress()
    results = []
    for to in (TARGET, SOURCE):
        result = training.move(to)
        assert result["warnings"] == []
        offloaded = sum(part["bytes"] for part in result["parts"] if part["name"] == "offload")
        assert offloaded >= float(LARGE_GIB) * GIB
        results.append(measured(result))
        training.runs_on(to)
    training.ends_as(undisturbed.want(LARGE))
    record("hold", gib=LARGE_GIB, undone=measured(undone), moves=results)
    print(f"\n| {LARGE_GIB} GiB | undone | there | back |\n| --- | --- | --- | --- |")
    for name in ("unlock", "offload", "relock", "checkpoint", "criu-dump", "criu-restore", "cuda-restore", "refill"):
        row = [f"{one.get('parts', {}).get(name, 0):.3f}" for one in (measured(undone), *results)]
        print(f"| {name} | {' | '.join(row)} |")
    print(f"| pause | {' | '.join(str(one.get('pause_s', '')) for one in (measured(undone), *results))} |")
