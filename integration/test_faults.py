"""Daemons and drivers are killed at each fault point of a move: one copy runs, nothing is lost, and a retry succeeds."""

from __future__ import annotations

import signal

import pytest

from integration.drill import MOVED, SOURCE, TARGET, UNDONE, Drill
from snapshotd.runtime.faults import Point

BEFORE_COMMIT = [
    Point.BEFORE_BEGIN,
    Point.BEGIN,
    Point.SENT_AHEAD,
    Point.READY,
    Point.BEFORE_FREEZE,
    Point.STOPPED,
    Point.FREEZE,
    Point.BEFORE_DUMP,
    Point.DUMPING,
    Point.STREAM,
    Point.BEFORE_COMMIT,
]
AFTER_COMMIT = [Point.COMMIT, Point.BEFORE_RELEASE, Point.RELEASE]
TARGET_BEFORE_COMMIT = [
    Point.BEFORE_PREPARE,
    Point.PREPARE,
    Point.RECEIVING,
    Point.SEAL,
    Point.BEFORE_RESTORE,
    Point.KEEPER_STARTED,
    Point.RESTORING,
    Point.RESTORED,
    Point.RESTORE,
]
TARGET_AFTER_COMMIT = [Point.BEFORE_ACTIVATE, Point.ACTIVATED, Point.ACTIVATE]


# ---------------------------------------------------------------- the source's daemon


@pytest.mark.sampled(3, cover="point")
@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_source_daemon_killed_before_commit_is_undone(drill: Drill, point: Point) -> None:
    drill.arm(SOURCE, point, "kill")
    drill.ask()
    drill.reached(SOURCE)
    drill.bring_back(SOURCE)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", AFTER_COMMIT)
def test_source_daemon_killed_after_commit_completes_the_move(drill: Drill, point: Point) -> None:
    drill.arm(SOURCE, point, "kill")
    drill.ask()
    drill.reached(SOURCE)
    drill.bring_back(SOURCE)
    drill.expect(MOVED)
    drill.finish(TARGET)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_ABORT, Point.ABORT])
def test_source_daemon_killed_during_the_undo_completes_it(drill: Drill, point: Point) -> None:
    drill.arm(SOURCE, point, "kill")
    drill.arm(TARGET, Point.BEFORE_RESTORE, "fail")
    drill.ask()
    drill.reached(SOURCE)
    drill.bring_back(SOURCE)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- the target's daemon


@pytest.mark.sampled(3, cover="point")
@pytest.mark.parametrize("point", TARGET_BEFORE_COMMIT)
def test_target_daemon_killed_before_commit_is_undone(drill: Drill, point: Point) -> None:
    drill.arm(TARGET, point, "kill")
    drill.ask()
    drill.reached(TARGET)
    drill.bring_back(TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", TARGET_AFTER_COMMIT)
def test_target_daemon_killed_after_commit_completes_the_move(drill: Drill, point: Point) -> None:
    drill.arm(TARGET, point, "kill")
    drill.ask()
    drill.reached(TARGET)
    drill.bring_back(TARGET)
    drill.expect(MOVED)
    drill.finish(TARGET)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_DISCARD, Point.DISCARD])
def test_target_daemon_killed_during_the_undo_completes_it(drill: Drill, point: Point) -> None:
    drill.arm(SOURCE, Point.BEFORE_COMMIT, "fail")
    drill.arm(TARGET, point, "kill")
    drill.ask()
    drill.reached(TARGET)
    drill.bring_back(TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- both daemons, restarts, and a daemon that hangs


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.DUMPING, Point.BEFORE_COMMIT])
def test_both_daemons_killed_before_commit_is_undone(drill: Drill, point: Point) -> None:
    with drill.waiting_at(SOURCE, point):
        drill.lab.kill_daemon(TARGET)
        drill.lab.kill_daemon(SOURCE)
        drill.lab.start_daemon(SOURCE)
        drill.lab.start_daemon(TARGET)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


def test_both_daemons_killed_after_commit_completes_the_move(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.COMMIT):
        drill.lab.kill_daemon(TARGET)
        drill.lab.kill_daemon(SOURCE)
        drill.lab.start_daemon(SOURCE)
        drill.lab.start_daemon(TARGET)
    drill.expect(MOVED)
    drill.finish(TARGET)


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point", "verdict", "at"),
    [
        (SOURCE, Point.BEGIN, UNDONE, SOURCE),
        (SOURCE, Point.DUMPING, UNDONE, SOURCE),
        (SOURCE, Point.COMMIT, MOVED, TARGET),
        (TARGET, Point.RECEIVING, UNDONE, SOURCE),
        (TARGET, Point.RESTORING, UNDONE, SOURCE),
        (TARGET, Point.ACTIVATED, MOVED, TARGET),
    ],
)
def test_daemon_restarted_with_sigterm_undoes_or_completes_the_move(
    drill: Drill, node: str, point: Point, verdict: tuple[str, int], at: str
) -> None:
    with drill.waiting_at(node, point):
        drill.lab.kill_daemon(node, signal.SIGTERM)
        drill.lab.start_daemon(node)
    drill.expect(verdict)
    drill.finish(at)


def test_target_daemon_that_hangs_is_abandoned_after_the_timeout(drill: Drill) -> None:
    drill.arm(TARGET, Point.BEFORE_RESTORE, "stop")
    drill.ask("--timeout", "20")  # on a busy machine, the steps before the point take some of it
    drill.reached(TARGET)
    drill.expect(UNDONE)
    drill.runs_on(SOURCE)
    drill.lab.kill_daemon(TARGET, signal.SIGCONT)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- the driver


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point", "at"),
    [
        (TARGET, Point.PREPARE, SOURCE),
        (SOURCE, Point.BEGIN, SOURCE),
        (SOURCE, Point.FREEZE, SOURCE),
        (SOURCE, Point.DUMPING, SOURCE),
        (TARGET, Point.SEAL, SOURCE),
        (TARGET, Point.RESTORING, SOURCE),
        (TARGET, Point.RESTORE, SOURCE),
        (SOURCE, Point.BEFORE_COMMIT, None),
        (SOURCE, Point.COMMIT, TARGET),
        (TARGET, Point.ACTIVATED, TARGET),
        (TARGET, Point.ACTIVATE, TARGET),
        (SOURCE, Point.BEFORE_RELEASE, TARGET),
    ],
)
def test_driver_killed_leaves_the_move_to_the_daemons(drill: Drill, node: str, point: Point, at: str | None) -> None:
    """The daemons finish or undo the move alone. A Commit that was already requested may still be carried out."""
    with drill.waiting_at(node, point):
        drill.kill_driver()
    drill.settled()
    drill.finish(at or drill.place())


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point", "at"),
    [
        (SOURCE, Point.FREEZE, SOURCE),
        (SOURCE, Point.COMMIT, TARGET),
        (TARGET, Point.RESTORED, SOURCE),
        (TARGET, Point.ACTIVATED, TARGET),
    ],
)
def test_driver_and_daemon_killed_leaves_the_move_to_the_journal(
    drill: Drill, node: str, point: Point, at: str
) -> None:
    """No request is repeated: the restarted daemon has only its journal, and the other daemon."""
    drill.arm(node, point, "kill")
    drill.ask()
    drill.reached(node)
    drill.kill_driver()
    drill.bring_back(node)
    drill.settled()
    drill.finish(at)


def test_driver_killed_during_activation_is_finished_by_the_target_alone(drill: Drill) -> None:
    """Only the target has the token, and has used half of it: ACTIVATED is written, and no process is running yet."""
    drill.arm(TARGET, Point.ACTIVATED, "wait")
    with drill.waiting_at(SOURCE, Point.COMMIT):
        drill.lab.partition(SOURCE, TARGET)
    drill.reached(TARGET)
    drill.kill_driver()
    drill.go_on(TARGET, Point.ACTIVATED)
    drill.goes_on()
    drill.lab.heal(SOURCE, TARGET)
    drill.settled()
    drill.finish(TARGET)
