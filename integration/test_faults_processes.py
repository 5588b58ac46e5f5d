"""criu, the rank or its keepers are killed during a move. No copy is ever left without its keeper."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from integration.drill import GONE, MOVED, SOURCE, TARGET, UNDONE, Drill, ended, kill
from integration.harness import PATIENCE_S, until
from snapshotd.runtime.faults import Point

# ---------------------------------------------------------------- criu


def test_criu_killed_during_the_dump_is_undone(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.DUMPING):
        group = drill.lab.layout.node_cgroup(SOURCE) / "snapshotd-ranks" / f"criu-{drill.move_id()}"
        (group / "cgroup.kill").write_text("1")
    drill.expect(UNDONE)
    drill.finish(SOURCE)


def test_criu_killed_during_the_restore_is_undone(drill: Drill) -> None:
    with drill.waiting_at(TARGET, Point.RESTORING):
        keeper = drill.guest_keeper(TARGET)
        children = set(map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()))
        (criu,) = children - set(drill.copies())
        kill(criu)
    drill.expect(UNDONE)
    drill.finish(SOURCE)


# ---------------------------------------------------------------- the rank


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point"),
    [
        (TARGET, Point.BEFORE_PREPARE),
        (SOURCE, Point.BEGIN),
        (SOURCE, Point.STOPPED),
        (SOURCE, Point.FREEZE),
        (SOURCE, Point.BEFORE_DUMP),
        (SOURCE, Point.DUMPING),
    ],
)
def test_rank_killed_before_the_target_has_a_copy_is_reported_as_ended(drill: Drill, node: str, point: Point) -> None:
    with drill.waiting_at(node, point):
        kill(drill.copy_on(SOURCE))
    answer = drill.expect(GONE).answer
    assert (answer["where"], answer["error"]) == ("ended", "rank-gone"), answer
    drill.killed()


def test_frozen_copy_killed_while_the_target_holds_the_rank_commits(drill: Drill) -> None:
    """The target's copy is complete: the move commits, and nothing is lost."""
    with drill.waiting_at(SOURCE, Point.BEFORE_COMMIT):
        kill(drill.copy_on(SOURCE))
    drill.expect(MOVED)
    drill.finish(TARGET)


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.COMMIT])
def test_held_copy_killed_is_undone(drill: Drill, point: Point) -> None:
    """It never ran, so the rank continues from the source's copy, even after COMMIT."""
    with drill.waiting_with_a_held_copy(point):
        kill(drill.copy_on(TARGET))
    drill.expect(UNDONE)
    drill.finish(SOURCE)


def test_both_copies_killed_is_reported_as_ended(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.BEFORE_COMMIT):
        kill(drill.copy_on(TARGET))
        kill(drill.copy_on(SOURCE))
    drill.expect(GONE)
    drill.killed()


def test_rank_killed_just_after_activation_ends_with_its_status(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.BEFORE_RELEASE):
        kill(drill.copy_on(TARGET))
    drill.expect(MOVED)
    drill.killed()


# ---------------------------------------------------------------- the keepers


@pytest.mark.sampled(1, per="node", cover="point")
@pytest.mark.parametrize(
    ("node", "point"),
    [
        (TARGET, Point.BEFORE_PREPARE),
        (SOURCE, Point.BEGIN),
        (SOURCE, Point.STOPPED),
        (SOURCE, Point.FREEZE),
        (SOURCE, Point.DUMPING),
        (TARGET, Point.RESTORING),
        (SOURCE, Point.BEFORE_COMMIT),
        (SOURCE, Point.COMMIT),
        (TARGET, Point.ACTIVATED),
        (SOURCE, Point.BEFORE_RELEASE),
    ],
)
def test_home_keeper_killed_ends_the_rank_on_any_node(drill: Drill, node: str, point: Point) -> None:
    """A rank without its home keeper must not run on, on whichever node it is by then."""
    with drill.waiting_at(node, point):
        drill.keeper.kill()
        drill.keeper.wait(PATIENCE_S)
    drill.result()
    drill.killed()


def test_home_keeper_killed_while_its_daemon_is_down_ends_the_rank(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.BEFORE_COMMIT):
        drill.lab.kill_daemon(SOURCE)
        drill.keeper.kill()
        drill.keeper.wait(PATIENCE_S)
        drill.lab.start_daemon(SOURCE)
    drill.result()
    drill.killed()


@pytest.mark.sampled(1, cover="point")
@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.COMMIT])
def test_guest_keeper_of_a_held_copy_killed_is_undone(drill: Drill, point: Point) -> None:
    with drill.waiting_with_a_held_copy(point):
        copy = drill.copy_on(TARGET)
        kill(drill.guest_keeper(TARGET))
        until("the copy to end with its keeper", lambda: ended(copy))
    drill.expect(UNDONE)
    drill.finish(SOURCE)


def test_guest_keeper_of_a_running_rank_killed_ends_the_rank(drill: Drill) -> None:
    drill.nodes.move(drill.job, TARGET)
    drill.runs_on(TARGET)
    kill(drill.guest_keeper(TARGET))
    drill.killed()


def test_home_keeper_killed_while_the_rank_is_away_ends_the_rank(drill: Drill) -> None:
    drill.nodes.move(drill.job, TARGET)
    drill.runs_on(TARGET)
    drill.keeper.kill()
    drill.killed()


def test_signal_sent_during_a_move_arrives_after_it(drill: Drill) -> None:
    with drill.waiting_at(SOURCE, Point.DUMPING):
        drill.keeper.send_signal(signal.SIGTERM)
    drill.expect(MOVED)
    drill.ended()
