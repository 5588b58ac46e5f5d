"""Nodes that crash, networks that are cut, and a person's word: what is settled alone, and what waits for it."""

from __future__ import annotations

import json

import pytest

from integration.drill import MOVED, OTHER, SOURCE, TARGET, UNDONE, Drill
from snapshotd.runtime.faults import Point

OPERATOR = "operator"


# ---------------------------------------------------------------- nodes


def test_the_source_crashes_while_the_target_holds_the_rank(drill: Drill) -> None:
    """Rebooted, it has no copy; the target has a whole one: COMMIT, though nobody is left to keep its output."""
    with drill.waiting_at(TARGET, Point.RESTORE):
        drill.lab.crash(SOURCE)
    drill.kill_driver()
    drill.lab.boot(SOURCE)
    drill.settled()
    drill.runs_on(TARGET)
    drill.end_orphan()


def test_the_source_crashes_after_commit(drill: Drill) -> None:
    with drill.waiting_at(TARGET, Point.BEFORE_ACTIVATE):
        drill.lab.crash(SOURCE)
    drill.expect(MOVED)
    drill.runs_on(TARGET)
    drill.lab.boot(SOURCE)
    drill.settled()
    drill.end_orphan()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.COMMIT])
def test_the_target_crashes_while_it_holds_the_rank(drill: Drill, point: Point) -> None:
    """The source keeps its frozen copy until the target runs: after COMMIT too the rank is taken back."""
    with drill.waiting_at(SOURCE, point):
        drill.lab.crash(TARGET)
    drill.lab.boot(TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- networks


@pytest.mark.sampled(1, per="point")
@pytest.mark.parametrize("end", [SOURCE, TARGET])
@pytest.mark.parametrize(("point", "node"), [(Point.DUMPING, SOURCE), (Point.COMMIT, SOURCE)])
def test_the_operator_is_cut_off(drill: Drill, end: str, point: Point, node: str) -> None:
    with drill.waiting_at(node, point):
        drill.lab.partition(OPERATOR, end)
        drill.kill_driver()
    drill.settled()
    at = drill.place()
    assert at == (TARGET if point is Point.COMMIT else SOURCE)
    drill.runs_on(at)
    drill.lab.heal(OPERATOR, end)
    drill.finish(at)


@pytest.mark.sampled(1, per="at")
@pytest.mark.parametrize(
    ("point", "at"), [(Point.DUMPING, SOURCE), (Point.BEFORE_COMMIT, TARGET), (Point.COMMIT, TARGET)]
)
def test_source_and_target_are_cut_off_each_other(drill: Drill, point: Point, at: str) -> None:
    """Before COMMIT the move fails; at COMMIT the driver carries the token, which is all the target needs."""
    with drill.waiting_at(SOURCE, point):
        drill.lab.partition(SOURCE, TARGET)
    drill.expect(MOVED if at == TARGET else UNDONE)
    drill.lab.heal(SOURCE, TARGET)
    drill.finish(at)


# ---------------------------------------------------------------- a person's word


def test_a_person_says_that_the_source_is_dead(drill: Drill) -> None:
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


def test_a_person_says_that_the_target_is_dead(drill: Drill) -> None:
    """After COMMIT the source would wait for ever for a target that is gone for good."""
    with drill.waiting_at(SOURCE, Point.COMMIT):
        drill.lab.crash(TARGET)
        drill.kill_driver()
    done = drill.nodes.migrator("recover", drill.move_id(), "--target-is-dead", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    drill.runs_on(SOURCE)
    drill.lab.boot(TARGET)
    drill.nodes.move(drill.job, OTHER)
    drill.end()


def test_recover_undoes_what_a_dead_driver_left(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.STREAM, "--lease", "600"):
        drill.kill_driver()
    done = drill.nodes.migrator("recover", drill.move_id(), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    drill.finish(SOURCE)
