"""Every event of a move (each step asked, done half, done, answered) × everything that can go wrong at it."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from migrator.protocol import TABLE, Verdict
from tests.protocol.faults import STRIKES, Scene, labels, single_faults
from tests.protocol.mover import leftovers, running

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
