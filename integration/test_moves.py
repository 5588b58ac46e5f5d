"""Programs move between daemons with CRIU, and their output is that of an uninterrupted run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.harness import WORKLOADS, Cluster, until
from tests.cli import chrome_trace
from tests.cli.chrome_trace import ROUNDED_US

#: What the calls of the pause consist of, and the node that does it.
PARTS = (
    ("Source.Freeze", "node-1", ("stop", "freeze")),
    ("Source.Stream", "node-1", ("criu-dump", "stream")),
    ("Target.Seal", "spare-1", ("verify",)),
    ("Target.Restore", "spare-1", ("start keeper", "criu-restore")),
)


def uninterrupted(program: str, *arguments: str) -> str:
    """The output of the same workload without `migrator run`."""
    command = [sys.executable, str(WORKLOADS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def shows_where_the_time_went(chart: chrome_trace.Chart, pause_s: float) -> None:
    """The trace of a move from node-1 to spare-1. That its spans nest was checked by `chrome_trace.read`."""
    assert chart.rows() == {"driver (migrator move)", "node-1 (source)", "spare-1 (target)"}
    assert chart.about["missing"] == {}
    pause = chart.one("pause")
    assert pause.seconds == pytest.approx(pause_s, abs=0.001)
    names = ("Freeze", "Stream", "Restore", "Repoint", "Commit", "Activate")
    steps = [chart.one(name, "driver") for name in names]
    for earlier, later in itertools.pairwise(steps):
        assert earlier.ended_us <= later.began_us, (earlier.name, later.name)
    freeze, activate = chart.one("Source.Freeze", "driver"), chart.one("Target.Activate", "driver")
    assert steps[0].began_us <= pause.began_us <= freeze.began_us
    assert activate.ended_us <= pause.ended_us <= steps[-1].ended_us
    for call, node in (("Source.Freeze", "node-1"), ("Source.Stream", "node-1"), ("Target.Restore", "spare-1")):
        asked, served = chart.one(call, "driver"), chart.one(call, node)
        assert asked.began_us <= served.began_us <= served.ended_us <= asked.ended_us  # although the clocks differ
    for call, node, parts in PARTS:
        calls = chart.named(call, node)  # several if the source has asked as well, or a seal took long: it asks again
        began_us = min(one.began_us for one in calls) - ROUNDED_US
        ended_us = max(one.ended_us for one in calls) + ROUNDED_US
        for part in (chart.one(name, node) for name in parts):
            assert began_us <= part.began_us <= part.ended_us <= ended_us, (part, calls)
    # In Activate, or before it: a target that has waited for long asks the source itself.
    restore, thaw = chart.one("Target.Restore", "spare-1"), chart.one("thaw", "spare-1")
    assert restore.ended_us <= thaw.began_us <= thaw.ended_us <= activate.ended_us, (restore, thaw, activate)
    assert chart.one("stream").args["bytes"] > 0


def ended_moves(nodes: Cluster, move: str) -> list[dict[str, Any]]:
    moves = json.loads(nodes.migrator("history", "--json").stdout)["moves"]
    return [one for one in moves if one["move"] == move]


def test_losses_of_a_moved_training_job_are_bit_identical(nodes: Cluster, tmp_path: Path) -> None:
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.workload("node-1", "train.py", "--end-file", str(end))
    job.await_lines(20)
    result = nodes.move(job, "spare-1", more=("--trace", str(tmp_path / "trace.json")))
    steps = str(job.end_soon(end))
    assert result["outcome"] == "moved"
    assert result["source"] == "node-1"
    assert result["target"] == "spare-1"
    shows_where_the_time_went(chrome_trace.read(tmp_path / "trace.json"), result["pause_s"])
    (past,) = until("the move to be in the history", lambda: ended_moves(nodes, result["move"]))
    assert result["predicted_s"] > 0
    assert past["predicted_s"] == pytest.approx(result["predicted_s"], abs=0.001)
    assert past["pause_s"] == pytest.approx(result["pause_s"], abs=0.001)
    assert job.finish() == 0
    assert job.text() == uninterrupted("train.py", "--steps", steps, "--pace-s", "0")


@pytest.mark.sampled(2)
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
