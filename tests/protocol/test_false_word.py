"""A person declares a source dead whose daemon is only down: one copy runs, whatever the source does when it is back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshotd.moves.rules import Mark, SourceDecision, SourceFacts, source_next
from tests.protocol import settling
from tests.protocol.faults import Scene, labels
from tests.protocol.mover import leftovers, person_says, running
from tests.protocol.network import AWAY, HOME, Broken
from tests.protocol.world import DRIVER

EVENTS = labels(back=False, ticking=False)
#: From the moment at which the target holds a copy until the source has recorded the outcome.
HELD, DECIDED = EVENTS.index("target: Restore answered"), EVENTS.index("source: record COMMIT")


def silent(event: int, *, driver_dies: bool) -> Scene:
    """The source's daemon dies at this event, with or without the driver."""
    scene = Scene({event: "source daemon dies"}, ticking=False, soon=False)
    if driver_dies:
        strike = scene.model.faults[scene.first_event + event]

        def both(world: object) -> None:
            strike(scene.model)
            scene.model.kill(DRIVER)

        scene.model.faults[scene.first_event + event] = both
    scene.move.run()
    return scene


def declared(event: int, *, driver_dies: bool, cut: bool) -> tuple[Scene, bool]:
    """The source's daemon dies at this event, and a person declares it dead. It is started again when the model settles."""
    scene = silent(event, driver_dies=driver_dies)
    accepted = person_says(scene.model, scene.target, "DeclareSourceDead", scene.move.name)
    if cut:
        scene.model.cuts.add(frozenset((HOME, AWAY)))
    return scene, accepted


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("driver_dies", [False, True])
@pytest.mark.parametrize("event", range(HELD, DECIDED + 1), ids=lambda event: EVENTS[event].replace(" ", "-"))
def test_one_copy_runs_after_a_false_declaration(event: int, driver_dies: bool, cut: bool) -> None:
    """The invariants are checked at every event. With a cut, the restarted source cannot ask the target at first."""
    scene, accepted = declared(event, driver_dies=driver_dies, cut=cut)
    model = scene.model
    scene.play_on()
    assert accepted
    assert [copy.node for copy in running(model)] == [scene.target]
    assert leftovers(model) == []
    assert scene.move.at_source is not None
    assert scene.move.at_source.mark is Mark.SETTLED


def test_source_that_cannot_ask_keeps_its_copy_frozen_until_a_person_declares_the_target_dead() -> None:
    """Nobody declared the source dead, but it cannot know that."""
    scene = silent(HELD, driver_dies=True)
    model = scene.model
    model.reboot(scene.target)
    model.dead_for_ever.add(scene.target)
    model.settle(3)
    assert running(model) == []
    assert person_says(model, scene.source, "DeclareTargetDead", scene.move.name)
    assert [copy.node for copy in running(model)] == [scene.source]


def test_source_that_does_not_ask_after_a_restart_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_silence(facts: SourceFacts) -> tuple[SourceDecision, str]:
        return source_next(replace(facts, restarted=False))

    monkeypatch.setattr(settling, "source_next", in_silence)
    scene, _ = declared(HELD, driver_dies=True, cut=True)
    with pytest.raises(Broken, match=r"may not run|copies run"):
        scene.play_on()


def test_source_that_ignores_the_declaration_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(facts: SourceFacts) -> tuple[SourceDecision, str]:
        decision, reason = source_next(facts)
        mine = decision is SourceDecision.RECORD_COMMIT and facts.copy_exists
        return (SourceDecision.RECORD_ABORT, reason) if mine else (decision, reason)

    monkeypatch.setattr(settling, "source_next", ignore)
    scene, _ = declared(HELD, driver_dies=True, cut=False)
    with pytest.raises(Broken, match=r"may not run|copies run"):
        scene.play_on()
