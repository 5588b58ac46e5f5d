"""Device memory that stays on the GPU until it is sent (`hold_device_memory`), on a real GPU.

Source and target share one GPU here. It needs room for the rank twice, unless the memory is handed over.
`SNAPSHOT_GPU_HOLD_GIB` sets the size of the job.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


def _of_the_gpu(what: str) -> int:
    """What is used of the GPU, by all processes, or how much it has, in MiB."""
    asked = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])


def _used_mib() -> int:
    return _of_the_gpu("used")


def _must_fit_twice() -> None:
    """With room for two contexts, and for the copy of a block."""
    if 2 * float(LARGE_GIB) * 1024 + 6144 > _of_the_gpu("total"):
        pytest.skip(f"the GPU has no room for {LARGE_GIB} GiB twice")


def _table(results: Mapping[str, dict[str, Any]]) -> None:
    """Prints the seconds of each part, of these moves."""
    print(f"\n| {LARGE_GIB} GiB | {' | '.join(results)} |\n| --- |{' --- |' * len(results)}")
    names = list(dict.fromkeys(name for one in results.values() for name in one.get("parts", {})))
    for name in names:
        cells = [f"{one.get('parts', {}).get(name, 0):.3f}" for one in results.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| pause | {' | '.join(str(one.get('pause_s', '')) for one in results.values())} |")


def test_undone_moves_leave_the_memory_and_nothing_else(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """The memory belongs to no process when the source's daemon is killed; its successor gives it back. After that and
    another undone move the job has memory of its own, once: the driver would not checkpoint it otherwise."""
    _must_fit_twice()
    training = Training.start(nodes, "hold-daemon", LARGE, device_memory="offload")
    training.await_moment()
    undisturbed.settled()  # it uses the GPU too
    before_mib = _used_mib()
    nodes.fault(SOURCE, Point.CHECKPOINTED, "kill")
    with nodes.begin_move(training.job, TARGET) as move:
        until("the daemon to die", lambda: nodes.lab.daemon_pid(SOURCE) is None)
        assert nodes.processes_of("snapshotd.holder.process")
        nodes.lab.start_daemon(SOURCE)
        move.wait(180)
    training.await_progress()
    nodes.fault(TARGET, Point.REFILLED, "fail")
    nodes.move(training.job, TARGET, expect=UNDONE)
    training.await_progress()
    until("the holder to end", lambda: not nodes.processes_of("snapshotd.holder"))
    until("the memory of the copies to be free", lambda: abs(_used_mib() - before_mib) < 256)
    training.move(TARGET)
    training.runs_on(TARGET)
    training.ends_as(undisturbed.want(LARGE))


def test_held_memory_moves_there_and_back_and_is_undone(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """One job: an undone move, a move there, and a move back with memory that was created by another process."""
    _must_fit_twice()
    training = Training.start(nodes, "hold", LARGE, device_memory="offload")
    training.await_moment()
    nodes.fault(SOURCE, Point.STREAM, "fail")
    undone = nodes.move(training.job, TARGET, expect=UNDONE)
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
    _table(dict(zip(("undone", "there", "back"), (measured(undone), *results), strict=True)))


@pytest.mark.timeout(1800)
def test_memory_is_handed_over_between_nodes_that_share_the_gpu(nodes: Cluster, undisturbed: Undisturbed) -> None:
    """One job, with up to nearly all of the GPU's memory: a move that fails when the copy has the memory, too, and moves
    there and back. The memory exists once all along."""
    undisturbed.settled()  # the GPU has no room for both
    hold_device_memory(nodes, (SOURCE, TARGET), on=True, hand_over=True)
    try:
        training = Training.start(nodes, "hand-over", LARGE, device_memory="offload")
        training.await_moment()
        before_mib = _used_mib()
        nodes.fault(TARGET, Point.REFILLED, "fail")
        results = {"undone": nodes.move(training.job, TARGET, expect=UNDONE)}
        training.await_progress()
        for name, to in (("there", TARGET), ("back", SOURCE)):
            result = results[name] = training.move(to)
            assert result["warnings"] == []
            taken = sum(part["bytes"] for part in result["parts"] if part["name"] == "take-over")
            assert taken >= float(LARGE_GIB) * GIB
            assert result["bytes"] < taken // 2, "what was handed over was not sent"
            training.runs_on(to)
            until("one copy of the memory", lambda: abs(_used_mib() - before_mib) < 1024)
        training.ends_as(undisturbed.want(LARGE))
    finally:
        hold_device_memory(nodes, (SOURCE, TARGET), on=True)
    found = {name: measured(result) for name, result in results.items()}
    record("hand-over", gib=LARGE_GIB, moves=found)
    _table(found)
