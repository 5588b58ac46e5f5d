"""Tests `migrator recover` on the model: declaring a node dead, which is refused while that node answers for the rank."""

from __future__ import annotations

import pytest

from migrator.protocol import Verdict
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.faults import Scene, labels
from tests.protocol.mover import Move, leftovers, person_says, running
from tests.protocol.network import AWAY, HOME

EVENTS = labels(back=False, ticking=False)


def power_off(event: int, node: str) -> Scene:
    """A move during which a node dies and does not come back, settled as far as the other node can."""
    scene = Scene({}, ticking=False)
    scene.model.dead_for_ever.add(node)
    scene.model.faults[event] = lambda world: world.reboot(node)
    scene.move.run()
    scene.model.settle()
    return scene


def power_on(scene: Scene) -> None:
    scene.model.dead_for_ever.clear()
    scene.model.settle(3)


@pytest.mark.parametrize("event", range(len(EVENTS)), ids=[f"{i:02} {label}" for i, label in enumerate(EVENTS)])
def test_declaring_the_source_dead_activates_a_held_copy(event: int) -> None:
    """A target with a held copy activates it. A target without a complete copy refuses."""
    scene = power_off(event, HOME)
    target = scene.move.at_target
    held = target is not None and target.mark is Mark.HELD and target.copy_exists
    assert person_says(scene.model, AWAY, "DeclareSourceDead", "m-1") == held
    scene.model.settle()
    run_on = target is not None and target.mark is Mark.ACTIVATED
    assert [copy.node for copy in running(scene.model)] == [AWAY] * run_on
    power_on(scene)
    assert [copy.node for copy in running(scene.model)] == [AWAY] * run_on
    assert leftovers(scene.model) == []
    if run_on:
        scene.retry(AWAY)


def test_returned_source_records_commit_for_a_rank_that_moved() -> None:
    """Otherwise `migrator history` would list a moved rank as undone."""
    for event, label in enumerate(EVENTS):
        scene = power_off(event, HOME)
        person_says(scene.model, AWAY, "DeclareSourceDead", "m-1")
        power_on(scene)
        if running(scene.model) and scene.move.at_source is not None:
            assert scene.move.at_source.outcome is Outcome.COMMIT, label


@pytest.mark.parametrize("event", range(len(EVENTS)), ids=[f"{i:02} {label}" for i, label in enumerate(EVENTS)])
def test_declaring_the_target_dead_thaws_the_source_copy(event: int) -> None:
    """The source's frozen copy continues, unless it was released. When the target comes back, it runs nothing."""
    scene = power_off(event, AWAY)
    source = scene.move.at_source
    if source is not None and not source.ended:
        assert person_says(scene.model, HOME, "DeclareTargetDead", "m-1")
    scene.model.settle()
    lives = scene.move.moved_copy is not None and scene.move.moved_copy.alive
    assert [copy.node for copy in running(scene.model)] == [HOME] * lives
    power_on(scene)
    assert [copy.node for copy in running(scene.model)] == [HOME] * lives
    assert leftovers(scene.model) == []
    if lives:
        scene.retry(HOME)


@pytest.mark.parametrize("declaration", ["DeclareSourceDead", "DeclareTargetDead"])
@pytest.mark.parametrize("label", ["source: record COMMIT", "driver: Activate asked", "target: let packets go"])
def test_running_node_cannot_be_declared_dead(declaration: str, label: str) -> None:
    """The driver dies, but both nodes run and reach each other, so they refuse the declaration."""
    scene = Scene({EVENTS.index(label): "driver dies"}, ticking=False)
    scene.move.run()
    target = scene.move.at_target
    assert target is not None
    assert target.copy_exists
    assert not person_says(scene.model, AWAY if declaration == "DeclareSourceDead" else HOME, declaration, "m-1")
    scene.play_on().judge()


def test_declaration_survives_a_crash_of_the_daemon() -> None:
    """It is recorded before it is carried out, and from then on no token for the overruled COMMIT is issued."""
    scene = power_off(EVENTS.index("driver: Activate asked"), AWAY)
    event = len(scene.model.labels)
    for after in range(8):
        again = power_off(EVENTS.index("driver: Activate asked"), AWAY)
        again.model.faults[event + after] = lambda world: world.kill(HOME)
        person_says(again.model, HOME, "DeclareTargetDead", "m-1")
        again.model.settle()
        if again.move.at_source is not None and again.move.at_source.overruled_by:
            assert [copy.node for copy in running(again.model)] == [HOME]
            assert again.model.on_getoutcome(HOME, "m-1").kind == "ABORT"


def test_second_move_of_a_busy_rank_is_refused_or_undone() -> None:
    """A move that begins while an earlier one is unsettled is refused or undone, and does not affect the earlier one."""
    for event, label in enumerate(EVENTS):
        scene = Scene({event: "driver dies"}, ticking=False)
        scene.move.run()
        begun = scene.move.at_source is not None and not scene.move.at_source.ended
        second = Move(scene.model, "m-9", HOME, AWAY)
        verdict = second.run()
        assert (verdict is Verdict.MOVED) == (not begun and scene.move.at_target_ran is False), label
        scene.model.settle(4)
        assert len(running(scene.model)) == 1, label
        assert leftovers(scene.model) == [], label
