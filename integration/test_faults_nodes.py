"""Nodes crash, links are cut, and an operator asserts that a node is dead: what the daemons settle alone, and what not."""

from __future__ import annotations

import json

import pytest

from integration.drill import MOVED, OTHER, SOURCE, TARGET, UNDONE, Drill
from integration.harness import until
from snapshotd.moves.rules import Mark
from snapshotd.runtime.faults import Point

OPERATOR = "operator"


# ---------------------------------------------------------------- nodes


@pytest.mark.sampled(4, group="faults of nodes")
def test_source_node_crash_commits_the_copy_that_the_target_holds(drill: Drill) -> None:
    """After its reboot the source has no copy and the target a complete one: COMMIT, although the home keeper is gone."""
    with drill.waiting_at(TARGET, Point.RESTORE):
        drill.lab.crash(SOURCE)
    drill.kill_driver()
    drill.lab.boot(SOURCE)
    drill.settled()
    drill.runs_on(TARGET)
    drill.end_orphan()


@pytest.mark.sampled(4, group="faults of nodes")
def test_source_node_crash_after_commit_runs_the_rank_on_the_target(drill: Drill) -> None:
    with drill.waiting_at(TARGET, Point.BEFORE_ACTIVATE):
        drill.lab.crash(SOURCE)
    drill.expect(MOVED)
    drill.runs_on(TARGET)
    drill.lab.boot(SOURCE)
    drill.settled()
    drill.end_orphan()


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.COMMIT])
def test_target_node_crash_while_it_holds_the_rank_is_undone(drill: Drill, point: Point) -> None:
    """The source keeps its frozen copy until the target's runs, so the rank returns to the source even after COMMIT."""
    with drill.waiting_with_a_held_copy(point):
        drill.lab.crash(TARGET)
    drill.lab.boot(TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- networks


@pytest.mark.sampled(1, per="point", cover="point")
@pytest.mark.parametrize("end", [SOURCE, TARGET])
@pytest.mark.parametrize(("point", "node"), [(Point.DUMPING, SOURCE), (Point.COMMIT, SOURCE)])
def test_operator_cut_off_from_a_node_leaves_the_move_to_the_daemons(
    drill: Drill, end: str, point: Point, node: str
) -> None:
    with drill.waiting_at(node, point):
        drill.lab.partition(OPERATOR, end)
        drill.kill_driver()
    drill.settled()
    at = drill.place()
    assert at == (TARGET if point is Point.COMMIT else SOURCE)
    drill.runs_on(at)
    drill.lab.heal(OPERATOR, end)
    drill.finish(at)


@pytest.mark.sampled(1, per="at", cover="point")
@pytest.mark.parametrize(
    ("point", "at"), [(Point.DUMPING, SOURCE), (Point.BEFORE_COMMIT, TARGET), (Point.COMMIT, TARGET)]
)
def test_source_and_target_cut_off_undoes_the_move_before_commit_only(drill: Drill, point: Point, at: str) -> None:
    """Before COMMIT the move fails. At COMMIT the driver carries the token, which is all that the target needs."""
    with drill.waiting_at(SOURCE, point):
        drill.lab.partition(SOURCE, TARGET)
    drill.expect(MOVED if at == TARGET else UNDONE)
    drill.lab.heal(SOURCE, TARGET)
    drill.finish(at)


# ---------------------------------------------------------------- assertions by an operator


@pytest.mark.sampled(4, group="faults of nodes")
def test_false_assertion_that_the_source_is_dead_leaves_one_copy(drill: Drill) -> None:
    """Only its daemon was down. The restarted daemon asks the target before it lets its own copy run."""
    with drill.waiting_at(TARGET, Point.RESTORE):
        drill.lab.kill_daemon(SOURCE)
        drill.kill_driver()
    until("the target to hold its copy", lambda: drill.moves()[TARGET][-1].last_mark is Mark.HELD)
    done = drill.nodes.migrator("recover", drill.move_id(), "--source-is-dead", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    drill.goes_on()
    drill.lab.start_daemon(SOURCE)
    drill.settled()
    drill.finish(TARGET)


@pytest.mark.sampled(4, group="faults of nodes")
def test_recover_with_source_is_dead_runs_the_rank_on_the_target(drill: Drill) -> None:
    with drill.waiting_at(TARGET, Point.RESTORE):
        drill.lab.crash(SOURCE)
    drill.kill_driver()
    move = drill.move_id()
    assert drill.copy_on(TARGET)
    done = drill.nodes.migrator("recover", move, "--source-is-dead", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["moves"][0]["outcome"] == "moved"
    drill.runs_on(TARGET)
    drill.lab.boot(SOURCE)
    drill.settled()
    drill.runs_on(TARGET)
    drill.end_orphan()


@pytest.mark.sampled(4, group="faults of nodes")
def test_recover_with_target_is_dead_runs_the_rank_on_the_source(drill: Drill) -> None:
    """After COMMIT the source would wait forever for a target that never returns."""
    with drill.waiting_with_a_held_copy(Point.COMMIT):
        drill.lab.crash(TARGET)
        drill.kill_driver()
    done = drill.nodes.migrator("recover", drill.move_id(), "--target-is-dead", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    drill.runs_on(SOURCE)
    drill.lab.boot(TARGET)
    drill.nodes.move(drill.job, OTHER)
    drill.end()


@pytest.mark.sampled(4, group="faults of nodes")
def test_recover_undoes_the_move_of_a_dead_driver(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.STREAM, "--lease", "600"):
        drill.kill_driver()
    done = drill.nodes.migrator("recover", drill.move_id(), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    drill.finish(SOURCE)
