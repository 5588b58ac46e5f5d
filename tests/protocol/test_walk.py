"""Tests every event of a move (each step requested, partly done, done, answered) with every fault that can occur at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, product

import pytest

from migrator.protocol import TABLE, Verdict
from snapshotd.moves.rules import CopyState, Mark, Outcome, proof
from tests.protocol.faults import STRIKES, Scene, labels, single_faults
from tests.protocol.mover import leftovers, running
from tests.protocol.network import AWAY, HOME, PEER
from tests.protocol.world import TARGET, Refused
from tests.sampling import Sampler

WALKS = ((False, False), (False, True), (True, True))  # back, ticking
CRASHES = ("driver dies", "source daemon dies", "target daemon dies", "peer daemon dies")
LASTING = [name for name in STRIKES if name.endswith("cut off")]
COSTLY = (
    "source node reboots",
    "peer node reboots",
)  # a rebooted node may reset a connection, unless the peer filters it


def test_move_without_faults_succeeds() -> None:
    scene = Scene({}).play()
    assert scene.move.verdict is Verdict.MOVED
    scene.judge()


@pytest.mark.parametrize("ticking", [False, True])
def test_walk_includes_every_step_of_the_table(ticking: bool) -> None:
    walked = labels(back=False, ticking=ticking)
    for step in TABLE:
        asked = "Close" if step.action == "Quiesce" else step.action
        assert f"driver: {asked} asked" in walked


def events_of(name: str, *, back: bool, ticking: bool) -> list[tuple[int, str]]:
    return [(event, label) for event, label, strike in single_faults(back=back, ticking=ticking) if strike == name]


@contextmanager
def named(*story: object) -> Iterator[None]:
    """Adds the scenario to an assertion error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in the story of {story}")
        raise


@pytest.mark.parametrize(("back", "ticking"), WALKS)
@pytest.mark.parametrize("name", STRIKES)
def test_single_fault_at_any_event_is_settled(name: str, back: bool, ticking: bool, sampled: Sampler) -> None:
    """What died comes back before the driver's next request, or only after the driver has given up."""
    events = events_of(name, back=back, ticking=ticking)
    assert events
    filtered = labels(back=back, ticking=ticking).index("peer: Hold answered")
    for event, label in sampled(events, 8):
        for soon in (True, False) if ("daemon" in name or "node" in name) and not back else (True,):
            with named(event, label, soon):
                scene = Scene({event: name}, back=back, ticking=ticking, soon=soon)
                scene.move.run()
                assert not scene.model.faults, "the fault has not struck"
                scene.play_on().judge(retry=event % 4 == 0)
                lost = scene.model.severed and scene.move.owner()
                costly = name in COSTLY and (name != "source node reboots" or event <= filtered)
                assert not lost or costly, "a connection is lost without need"


UNRUN = ("target node reboots", "guest keeper dies on target")


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("ticking", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", UNRUN)
def test_copy_that_dies_between_held_and_activated_continues_on_the_source(
    name: str, back: bool, ticking: bool, soon: bool
) -> None:
    """Exactly one copy runs, without an operator. After COMMIT this needs the target's report, which is recorded."""
    walked = labels(back=back, ticking=ticking)
    taken_back = 0
    for event in range(walked.index("target: mark held") + 1, walked.index("target: mark activated") + 1):
        if walked[event] == "target: mark activated" and name != "target node reboots":
            continue  # the daemon runs and writes the mark: the copy counts as one that has run
        scene = Scene({event: name}, back=back, ticking=ticking, soon=soon).play()
        source = scene.move.at_source
        assert source is not None
        assert [copy.node for copy in running(scene.model)] == [scene.source], walked[event]
        assert source.overruled_by == (TARGET if source.outcome is Outcome.COMMIT else "")
        assert scene.move.verdict in (Verdict.UNDONE, Verdict.UNKNOWN)
        taken_back += source.outcome is Outcome.COMMIT
        scene.judge()
    assert taken_back


def test_late_token_does_not_activate_a_dead_copy() -> None:
    """Activate, with a valid token, reaches a target that has answered GONE, before or after the source knows of it."""
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


def test_copy_whose_keeper_is_dead_is_killed_and_not_thawed() -> None:
    """After COMMIT the home keeper is killed and the target's copy dies. The source's copy is killed, not thawed."""
    walked = labels(back=False, ticking=False)
    for event in range(walked.index("source: record COMMIT") + 1, walked.index("target: mark activated")):
        scene = Scene({event: "home keeper dies", event + 1: "guest keeper dies on target"}, ticking=False).play()
        scene.judge()
        assert "home: thaw" not in scene.model.labels


@pytest.mark.parametrize(("back", "ticking"), WALKS)
@pytest.mark.parametrize("name", LASTING)
def test_permanent_partition_leaves_exactly_one_running_copy(
    name: str, back: bool, ticking: bool, sampled: Sampler
) -> None:
    """Any two participants are partitioned for ever. A third one passes on the outcome, and exactly one copy runs."""
    for event, label in sampled(events_of(name, back=back, ticking=ticking), 8):
        with named(event, label):
            scene = Scene({event: name}, back=back, ticking=ticking)
            scene.move.run()
            scene.model.settle()
            copies = running(scene.model)
            assert len(copies) == 1
            if name != "source and target cut off" and frozenset((copies[0].node, PEER)) not in scene.model.cuts:
                assert leftovers(scene.model) == []


@pytest.mark.parametrize(("first", "second"), list(product(CRASHES, CRASHES)))
def test_two_crashes_at_any_events_are_settled(first: str, second: str, sampled: Sampler) -> None:
    """Uses every twelfth pair of events; the second crash may occur while the daemons settle after the first."""
    events = len(labels(back=False, ticking=False)) + 12
    pairs = [pair for pair in combinations(range(events), 2) if (5 * pair[0] + pair[1]) % 12 == CRASHES.index(second)]
    for one, two in sampled(pairs, 30):
        with named(one, two):
            Scene({one: first, two: second}, ticking=False, soon=True).play().judge(retry=False)


@pytest.mark.sampled(3, per="first")
@pytest.mark.parametrize("first", list(STRIKES))
@pytest.mark.parametrize("second", list(STRIKES))
def test_two_faults_of_any_kind_are_settled(first: str, second: str) -> None:
    """Coarser: uses some events only, which depend on the faults. The rank need not survive, since both copies may die."""
    events = len(labels(back=False, ticking=True))
    shift = list(STRIKES).index(first) * 7 + list(STRIKES).index(second) * 3
    for one, two in product(range(shift % 28, events, 28), range(shift % 17, events + 12, 17)):
        if one < two:
            with named(one, two):
                scene = Scene({one: first, two: second}, soon=False, survived=False)
                scene.play().judge(retry=False)
