"""Programs move between daemons with CRIU, and their output is that of an uninterrupted run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import WORKLOADS, Cluster


def uninterrupted(program: str, *arguments: str) -> str:
    """The output of the same workload without `migrator run`."""
    command = [sys.executable, str(WORKLOADS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_losses_of_a_moved_training_job_are_bit_identical(nodes: Cluster) -> None:
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.workload("node-1", "train.py", "--end-file", str(end))
    job.await_lines(20)
    result = nodes.move(job, "spare-1")
    steps = str(job.end_soon(end))
    assert result["outcome"] == "moved"
    assert result["source"] == "node-1"
    assert result["target"] == "spare-1"
    assert job.finish() == 0
    assert job.text() == uninterrupted("train.py", "--steps", steps, "--pace-s", "0")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "program",
    [
        "children.py",
        "threads.py",
        "timers.py",
        "blocking.py",
        "events.py",
        "shm.py",
        "ghosts.py",
        "files.py",
        "dataloader.py",
        "spawn_semaphores.py",
    ],
)
def test_process_state_survives_moves(nodes: Cluster, program: str, tmp_path: Path) -> None:
    arguments = ("--folder", str(nodes.folder)) if program in {"files.py", "events.py"} else ()
    (nodes.folder / "shared.log").unlink(missing_ok=True)
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.workload("node-1", program, "--end-file", str(end), *arguments)
    job.await_lines(10)
    nodes.move(job, "spare-1")
    with (nodes.folder / "shared.log").open("a") as log:
        log.write("another process\n")
    job.await_progress()
    nodes.move(job, "node-2")
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    (nodes.folder / "shared.log").unlink(missing_ok=True)
    assert job.text() == uninterrupted(program, "--steps", str(steps), "--pace-s", "0.001", *arguments)


def test_exactly_one_copy_runs_and_it_is_on_the_target(nodes: Cluster) -> None:
    job = nodes.workload("node-1", "train.py", "--steps", "4321")
    job.await_lines(5)
    nodes.move(job, "spare-1")
    job.await_progress()
    assert len(nodes.processes_of("4321")) == 1
    places = {rank["node"]: rank for rank in nodes.ps(job)}
    assert list(places) == ["spare-1"]
    assert places["spare-1"]["home"] == "node-1"
