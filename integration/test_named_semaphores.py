"""Named semaphores of spawned workers, whose names are already unlinked, move with the rank."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from integration.drill import kill, node_of
from integration.harness import PATIENCE_S, Cluster, Job
from integration.test_moves import uninterrupted
from snapshotd.runtime.faults import Point

HOME, AWAY = "node-1", "spare-1"
PROGRAM = "spawn_semaphores.py"
_numbers = itertools.count(1)


def memory_of(nodes: Cluster, node: str) -> Path:
    """A node's /dev/shm, from outside."""
    return nodes.run_dir(node).parents[1] / "dev" / "shm"


def names_on(nodes: Cluster, node: str) -> set[str]:
    return {path.name for path in memory_of(nodes, node).iterdir()}


def started(nodes: Cluster) -> tuple[Job, Path]:
    """The job, and the file that ends it."""
    end = nodes.folder / f"semaphores-{next(_numbers)}.end"
    end.unlink(missing_ok=True)
    return nodes.workload(HOME, PROGRAM, "--end-file", str(end)), end


def ends_well(job: Job, end: Path) -> None:
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.text() == uninterrupted(PROGRAM, "--steps", str(steps), "--pace-s", "0.001")


def test_semaphores_of_spawned_workers_survive_moves_and_undone_moves(nodes: Cluster) -> None:
    others = names_on(nodes, HOME)
    job, end = started(nodes)
    job.await_lines(5)
    names = names_on(nodes, HOME) - others
    assert all(name.startswith("sem.mp-") for name in names)
    assert len(names) > 5

    before = names_on(nodes, AWAY)
    with nodes.moving(job, AWAY, AWAY, Point.RESTORING) as asked:
        assert any(name.endswith(".ghost") for name in names_on(nodes, AWAY) - before)  # the workers' array
        (criu,) = [pid for pid in nodes.processes_of("criu: restore --rpc") if node_of(pid) == AWAY]
        kill(criu)
    assert asked.code == 11, asked
    assert names_on(nodes, AWAY) == before
    assert names_on(nodes, HOME) == others | names
    job.await_progress()

    for to in (AWAY, HOME, AWAY, HOME):
        nodes.move(job, to)
        assert names <= names_on(nodes, to)
        assert not any(name.startswith("link_remap") for node in (HOME, AWAY) for name in names_on(nodes, node))
        job.await_progress()

    ends_well(job, end)
    assert names_on(nodes, HOME) == others


def test_links_of_a_killed_criu_are_removed(nodes: Cluster) -> None:
    """The test makes the links that criu would make a moment later, because catching criu in the act would be a race."""
    others = names_on(nodes, HOME)
    job, end = started(nodes)
    job.await_lines(5)
    names = names_on(nodes, HOME) - others
    memory = memory_of(nodes, HOME)
    with nodes.moving(job, AWAY, HOME, Point.DUMPING) as asked:
        for number, name in enumerate(names):
            os.link(memory / name, memory / f"link_remap.{number}")
        (group,) = nodes.lab.layout.node_cgroup(HOME).rglob("criu-*")
        (group / "cgroup.kill").write_text("1")
    assert asked.code == 11, asked
    assert names_on(nodes, HOME) == others | names
    nodes.move(job, AWAY)
    ends_well(job, end)


def test_two_ranks_with_unlinked_semaphores_move_at_the_same_time(nodes: Cluster) -> None:
    """criu numbers the links of both ranks alike, so in one /dev/shm their names would collide."""
    jobs = [started(nodes) for _ in range(2)]
    for job, _ in jobs:
        job.await_lines(5)
    moves = [nodes.begin_move(job, AWAY) for job, _ in jobs]
    result = [move.communicate(timeout=PATIENCE_S) for move in moves]
    assert [move.returncode for move in moves] == [0, 0], f"{result}\n{nodes.logs()}"
    for job, end in jobs:
        ends_well(job, end)
