"""Tests the gates of an NCCL job: closed from the cut to the outcome, and opened only when the communicator is complete."""

from __future__ import annotations

import pytest

from snapshotd.moves.rules import GateDecision, GateFacts, Mark, Outcome, gate_next
from tests.protocol import gating
from tests.protocol.faults import Scene, labels
from tests.protocol.gating import LOST_S, SILENT_S, gate_of
from tests.protocol.mover import leftovers, running
from tests.protocol.network import AWAY, HOME, PEER, Broken
from tests.protocol.world import LEASE_S
from tests.sampling import Sampler

PAL = "pal"
WALKED = labels(back=False, ticking=False)


def test_communicator_is_destroyed_before_the_freeze_and_recreated_before_commit() -> None:
    """No thread or socket of NCCL is in a dump. The outcome is decided only when the target's copy has the communicator."""
    order = [
        "driver: Close asked",
        "source: take the communicator down",
        "source: stop and freeze",
        "target: mark held",
        "target: build the communicator",
        "source: record COMMIT",
        "target: open its gate",
        "peer: open the gates",
    ]
    places = [WALKED.index(label) for label in order]
    assert places == sorted(places)


@pytest.mark.parametrize("ticking", [False, True])
def test_job_continues_after_the_driver_or_a_daemon_dies_at_any_event(ticking: bool, sampled: Sampler) -> None:
    """With three members, each daemon and the driver die at every event. `judge` checks the gates and the communicator."""
    events = range(WALKED.index("driver: Close asked"), len(WALKED))
    for name in ("driver dies", "source daemon dies", "target daemon dies", "peer daemon dies"):
        for event in sampled(events, 20):
            scene = Scene({event: name}, ticking=ticking, soon=False, peers=(PEER, PAL)).play()
            scene.judge(retry=event % 5 == 0)
            assert not scene.model.given_up


def test_job_continues_if_the_driver_dies_while_gates_are_closed() -> None:
    scene = Scene({WALKED.index("driver: Detach asked"): "driver dies"}, ticking=False)
    scene.move.run()
    assert all(program.gated for program in scene.model.programs.values())
    scene.model.settle()
    assert leftovers(scene.model) == []
    assert scene.model.attempts == 0, "nothing was taken down, so nothing is built again"
    scene.judge()


def waits_for_the_target() -> Scene:
    """The driver dies after COMMIT, and source and target are partitioned. The target's copy does not run yet."""
    scene = Scene({WALKED.index("source: Commit answered"): "driver dies"}, ticking=False)
    scene.move.run()
    scene.model.cuts.add(frozenset((HOME, AWAY)))
    scene.model.settle()
    return scene


def test_gate_opens_for_commit_only_once_the_target_runs_the_rank() -> None:
    scene = waits_for_the_target()
    record = scene.model.journal[PEER, gate_of("m-1")]
    assert (record.mark, record.outcome) == (Mark.GATED, None)
    scene.kill_target_copy()
    scene.play_on()
    assert [copy.node for copy in running(scene.model)] == [HOME]
    assert not scene.model.given_up
    scene.judge()


def test_gate_that_opens_for_a_revocable_commit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_at_commit(facts: GateFacts) -> tuple[GateDecision, str]:
        early = facts.source is Outcome.COMMIT and not facts.outcome
        return (GateDecision.LEARN_COMMIT, "") if early else gate_next(facts)

    monkeypatch.setattr(gating, "gate_next", open_at_commit)
    scene = waits_for_the_target()
    scene.kill_target_copy()
    with pytest.raises(Broken, match="the communicator is not whole"):
        scene.play_on()


def test_gates_stay_closed_until_the_communicator_is_restored() -> None:
    """The source cannot reach a peer for longer than anything waits. No gate opens, and then the communicator is whole."""
    scene = Scene({WALKED.index("driver: Freeze asked"): "source and peer cut off"}, ticking=False)
    scene.move.run()
    before = scene.model.now_s
    scene.model.settle(int(2 * LOST_S / LEASE_S))
    assert scene.model.now_s - before > LOST_S
    assert all(copy.gated for copy in scene.model.members())
    scene.model.cuts.clear()
    scene.model.settle()
    assert leftovers(scene.model) == []
    assert scene.model.whole()
    assert not scene.model.given_up


@pytest.mark.parametrize(("gone", "patience_s"), [((HOME,), SILENT_S), ((HOME, AWAY), LOST_S)])
def test_gate_in_front_of_a_missing_communicator_stays_closed_until_its_process_ends(
    gone: tuple[str, ...], patience_s: float
) -> None:
    """The source dies while the target receives, or both die. The communicator cannot be rebuilt."""
    scene = Scene({WALKED.index("driver: Stream asked"): "source daemon dies"}, ticking=False)
    scene.model.dead_for_ever |= set(gone)
    scene.move.run()
    for node in gone:
        scene.model.kill(node)
    scene.model.settle()
    assert scene.model.programs[PEER].gated
    scene.model.settle(int(patience_s / LEASE_S) + 2)
    assert scene.model.programs[PEER].gated
    assert scene.model.journal[PEER, gate_of("m-1")].outcome is None
    scene.model.programs[PEER].alive = False
    scene.model.settle()
    assert scene.model.journal[PEER, gate_of("m-1")].outcome is Outcome.ABORT


def test_gate_opens_if_source_and_target_never_come_back_and_nothing_was_taken_down() -> None:
    scene = Scene({WALKED.index("driver: Detach asked"): "source daemon dies"}, ticking=False)
    scene.model.dead_for_ever |= {HOME, AWAY}
    scene.move.run()
    for node in (HOME, AWAY):
        scene.model.kill(node)
    scene.model.settle(int(LOST_S / LEASE_S) + 2)
    assert not scene.model.programs[PEER].gated
    assert scene.model.journal[PEER, gate_of("m-1")].outcome is Outcome.ABORT


# ------------------------------------------------------------ the model itself


def test_model_detects_an_open_gate_with_an_incomplete_communicator() -> None:
    scene = Scene({}, ticking=False)
    scene.model.programs[PEER].comm = 0
    with pytest.raises(Broken, match="the communicator is not whole"):
        scene.model.check()
    for copy in scene.model.members():
        copy.gated = True
    scene.model.check()
    assert "a closed gate on peer" in leftovers(scene.model)


def test_model_detects_a_communicator_change_with_an_open_gate() -> None:
    scene = Scene({}, ticking=False)
    with scene.model.acting(PEER), pytest.raises(Broken, match="behind an open gate"):
        scene.model.change(PEER, scene.model.programs[PEER], 0)


def test_rank_that_is_the_only_member_left_gets_its_communicator_back() -> None:
    """The other member's node reboots before the gates are closed, and the move is undone after the rank was detached."""
    undisturbed = Scene({}, ticking=False)
    undisturbed.move.run()
    event = undisturbed.model.labels.index("driver: PrepareDevice asked") + 1
    scene = Scene({event: "peer node reboots"}, ticking=False, soon=True).play()
    assert "home: take the communicator down" in scene.model.labels
    scene.judge()
