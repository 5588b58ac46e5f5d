"""Every event of a move (each step asked, done half, done, answered) × everything that can go wrong at it."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations, product

import pytest

from migrator.protocol import TABLE, Verdict
from snapshotd.rules import CopyState, Mark, Outcome, proof
from tests.protocol.faults import STRIKES, Scene, labels, single_faults
from tests.protocol.mover import leftovers, running
from tests.protocol.network import AWAY, HOME
from tests.protocol.world import TARGET, Refused

CASES = [
    pytest.param(event, name, back, ticking, id=f"{name} at {event:02} {label}{' - back' * back}{' - busy' * ticking}")
    for back, ticking in ((False, False), (False, True), (True, True))
    for event, label, name in single_faults(back=back, ticking=ticking)
]
CRASHES = ("driver dies", "source daemon dies", "target daemon dies")
LASTING = ("driver and source cut off", "driver and target cut off", "source and target cut off")


def test_a_move_without_faults() -> None:
    scene = Scene({}).play()
    assert scene.move.verdict is Verdict.MOVED
    scene.judge()


@pytest.mark.parametrize("ticking", [False, True])
def test_every_step_of_the_table_is_walked(ticking: bool) -> None:
    walked = labels(back=False, ticking=ticking)
    for step in TABLE:
        assert f"driver: {step.action} asked" in walked


@pytest.mark.parametrize(("event", "name", "back", "ticking"), CASES)
def test_one_fault(event: int, name: str, back: bool, ticking: bool) -> None:
    """Whoever died comes back before the driver's next request, or only when the driver has given up."""
    for soon in (True, False) if "daemon" in name or "node" in name else (True,):
        scene = Scene({event: name}, back=back, ticking=ticking, soon=soon)
        scene.move.run()
        assert not scene.model.faults, "the fault has not struck"
        scene.play_on().judge()


UNRUN = ("target node reboots", "guest keeper dies on target")


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("ticking", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", UNRUN)
def test_what_dies_at_the_target_between_held_and_activated_goes_on_at_the_source(
    name: str, back: bool, ticking: bool, soon: bool
) -> None:
    """Exactly one copy, without any person; after COMMIT on the target's recorded word."""
    walked = labels(back=back, ticking=ticking)
    taken_back = 0
    for event in range(walked.index("target: mark held") + 1, walked.index("target: mark activated") + 1):
        if walked[event] == "target: mark activated" and name != "target node reboots":
            continue  # the daemon lives and writes the mark: the copy counts as one that has run
        scene = Scene({event: name}, back=back, ticking=ticking, soon=soon).play()
        source = scene.move.at_source
        assert source is not None
        assert [copy.node for copy in running(scene.model)] == [scene.source], walked[event]
        assert source.word == (TARGET if source.outcome is Outcome.COMMIT else "")
        assert scene.move.verdict in (Verdict.UNDONE, Verdict.UNKNOWN)
        taken_back += source.outcome is Outcome.COMMIT
        scene.judge()
    assert taken_back


def test_a_token_that_comes_late_wakes_nothing() -> None:
    """Activate with a valid token at a target that has answered GONE, before and after the source has heard of it."""
    commit = labels(back=False, ticking=False).index("driver: Activate asked")
    for heard in (False, True):
        scene = Scene({commit: "driver dies"}, ticking=False)
        scene.move.run()
        scene.kill_target_copy()
        assert scene.model.on_getcopy(AWAY, "m-1").copy is CopyState.GONE
        if heard:
            scene.model.settle()
        token = proof(b"nonce of m-1", Outcome.COMMIT, "m-1")
        with scene.model.acting(AWAY), suppress(Refused):
            assert scene.model.on_activate(AWAY, "m-1", token).copy is CopyState.DISCARDED
        assert scene.move.at_target is not None
        assert scene.move.at_target.mark is Mark.DISCARDED
        scene.play_on()
        assert [copy.node for copy in running(scene.model)] == [HOME]
        scene.judge()


def test_what_nobody_keeps_is_not_taken_back() -> None:
    """After COMMIT the home keeper is killed and the target's copy dies: the source's copy is killed, not thawed."""
    walked = labels(back=False, ticking=False)
    for event in range(walked.index("source: record COMMIT") + 1, walked.index("target: mark activated")):
        scene = Scene({event: "home keeper dies", event + 1: "guest keeper dies on target"}, ticking=False).play()
        scene.judge()
        assert "home: thaw" not in scene.model.labels


@pytest.mark.parametrize(("event", "name", "back", "ticking"), [case for case in CASES if case.values[1] in LASTING])
def test_a_partition_that_never_heals_stops_nobody(event: int, name: str, back: bool, ticking: bool) -> None:
    """Any two parties cut off for ever: the third carries the word, and exactly one copy runs."""
    scene = Scene({event: name}, back=back, ticking=ticking)
    scene.move.run()
    scene.model.settle()
    assert len(running(scene.model)) == 1
    if name != "source and target cut off":
        assert leftovers(scene.model) == []


@pytest.mark.parametrize(("first", "second"), list(product(CRASHES, CRASHES)))
def test_two_crashes(first: str, second: str) -> None:
    """All pairs of events, the second also while the daemons settle what the first left."""
    events = len(labels(back=False, ticking=False)) + 12
    for one, two in combinations(range(events), 2):
        Scene({one: first, two: second}, ticking=False, soon=True).play().judge()


@pytest.mark.parametrize("first", list(STRIKES))
@pytest.mark.parametrize("second", list(STRIKES))
def test_two_faults_of_any_kind(first: str, second: str) -> None:
    """Coarser: some events, and no promise of survival, since two copies may die."""
    events = len(labels(back=False, ticking=True))
    for one, two in product(range(0, events, 10), range(5, events + 12, 10)):
        if one < two:
            scene = Scene({one: first, two: second}, soon=False, survived=False)
            scene.play().judge()
