"""Programs remember the paths of files that they have closed. What a rank has made below /tmp and /dev/shm moves with it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from integration.clients.compiling import COMPILES_S, compile_after_every_move
from integration.harness import PATIENCE_S, Cluster, until
from integration.job_commands import ask
from integration.job_device_memory import asking
from snapshotd.runtime.faults import Point

PROGRAMS = Path(__file__).parent / "programs"
#: Steps after which the program writes one of its files anew.
CHANGES_EVERY = 40


def test_closed_files_are_the_same_after_every_move(nodes: Cluster) -> None:
    """There, further on, and back to a node that has what the rank left. Some change after they were sent ahead."""
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.start("node-1", [sys.executable, str(PROGRAMS / "closed_files.py"), "--end-file", str(end)])
    job.await_lines(CHANGES_EVERY)
    with nodes.moving(job, "spare-1", "node-1", Point.SENT_AHEAD) as asked:
        job.await_progress(CHANGES_EVERY + 1)
    assert asked.code == 0, asked
    for place in ("node-2", "node-1", "spare-1"):
        job.await_progress()
        nodes.move(job, place)
    job.await_progress()
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-2000:]
    assert job.lines() == [*(f"step {step}" for step in range(steps)), "DONE"]


def test_closed_files_that_change_after_they_were_stored_are_as_at_the_freeze(nodes: Cluster) -> None:
    """A job that is suspended and resumed on another node, then snapshotted and rolled back: the store gets most of its files
    while it runs. The first try ends with its daemon, and what it had stored is gone."""
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.start("node-1", [sys.executable, str(PROGRAMS / "closed_files.py"), "--end-file", str(end)])
    job.await_lines(CHANGES_EVERY)
    with asking(nodes, "node-1", Point.SENT_AHEAD, "kill", "suspend", job.name):
        pass
    nodes.lab.start_daemon("node-1", timeout_s=PATIENCE_S)
    until("the image to be removed", lambda: not list(nodes.lab.layout.state.glob("*/suspended/m-*")))
    with asking(nodes, "node-1", Point.SENT_AHEAD, "wait", "suspend", job.name) as asked:
        job.await_progress(CHANGES_EVERY + 1)
    assert asked.code == 0, asked
    assert "closed files ahead" in nodes.logs(1000)
    ask(nodes, "resume", job.name, "--on", "0=spare-1")
    job.await_progress()
    with asking(nodes, "spare-1", Point.SENT_AHEAD, "wait", "snapshot", job.name) as asked:
        job.await_progress(CHANGES_EVERY + 1)
    assert asked.code == 0, asked
    os.kill(nodes.ps(job)[0]["pid"], signal.SIGKILL)
    ask(nodes, "rollback", job.name, "--on", "0=node-2")
    job.await_progress()
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-2000:]
    assert job.lines() == [*(f"step {step}" for step in range(steps)), "DONE"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("action", ["fail", "kill"])
def test_move_that_is_undone_removes_the_closed_files_that_it_made(nodes: Cluster, action: str) -> None:
    """The target's daemon fails, or is killed, when it has made them."""
    job = nodes.start("node-1", [sys.executable, str(PROGRAMS / "closed_files.py"), "--steps", "100000"])
    job.await_lines(3)
    before = local_files(nodes, "spare-1")
    assert local_files(nodes, "node-1") - before
    nodes.fault("spare-1", Point.RESTORED, action)
    nodes.move(job, "spare-1", expect=11)
    if action == "kill":
        nodes.lab.start_daemon("spare-1")
    until("what the move made is gone", lambda: local_files(nodes, "spare-1") <= before)
    job.await_progress()
    nodes.move(job, "spare-1")
    job.await_progress()
    assert local_files(nodes, "spare-1") - before


def local_files(nodes: Cluster, node: str) -> set[str]:
    """What is directly in a node's own directories, except in those of the lab."""
    root = nodes.run_dir(node).parents[1]
    return {str(path.relative_to(root)) for place in ("tmp", "dev/shm") for path in (root / place).iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(4 * COMPILES_S)
def test_torch_compile_compiles_again_after_a_move(nodes: Cluster, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--whole"):
        pytest.skip("compiling takes minutes: make test-all")
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    compile_after_every_move(nodes, ("spare-1", "node-1"))
