"""Tests communicators that can never be complete again: they are abandoned, and only then do gates open without them."""

from __future__ import annotations

import pytest

from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.faults import Scene
from tests.protocol.gating import LOST_S, Gating, gate_of
from tests.protocol.mover import leftovers, person_says, running
from tests.protocol.network import AWAY, HOME, PEER, Broken, Copy
from tests.protocol.world import LEASE_S
from tests.sampling import Sampler

PAL = "pal"


def walk() -> list[str]:
    """The events of a move without faults, with two other members."""
    scene = Scene({}, ticking=False, peers=(PEER, PAL))
    scene.move.run()
    return [label.replace(HOME, "source").replace(AWAY, "target") for label in scene.model.labels]


WALKED = walk()
FIRST, LAST = WALKED.index("source: take the communicator down") + 1, WALKED.index("source: record COMMIT")


def member_dies(event: int) -> Scene:
    """The node of another member dies for ever while the communicator is down; what is left of the cluster has settled."""
    scene = Scene({}, ticking=False, peers=(PEER, PAL))
    scene.model.dead_for_ever.add(PAL)
    scene.model.faults[event] = lambda world: world.reboot(PAL)
    scene.move.run()
    scene.model.settle(int(2 * LOST_S / LEASE_S))
    return scene


def waits(scene: Scene) -> bool:
    source = scene.move.at_source
    return source is not None and source.holds is Outcome.ABORT and source.mark is not Mark.SETTLED


def test_dead_member_keeps_gates_closed_until_a_person_declares_it(sampled: Sampler) -> None:
    """At every event while the communicator is down. No wait is long enough, and the declaration ends it."""
    waited = 0
    for event in sampled(range(FIRST, LAST), 12):
        scene = member_dies(event)
        if not waits(scene):
            continue  # it died before it was a member, or after it had taken part
        waited += 1
        assert all(copy.gated for copy in scene.model.members()), WALKED[event]
        assert person_says(scene.model, HOME, "DeclareMemberDead", "m-1", PAL), WALKED[event]
        scene.model.settle()
        assert not any(copy.gated for copy in scene.model.members()), WALKED[event]
        assert all(copy.lost for copy in scene.model.members()), WALKED[event]
        assert [copy.node for copy in running(scene.model)] == [HOME]
        scene.model.dead_for_ever.clear()
        scene.model.settle(3)
        assert leftovers(scene.model) == [], WALKED[event]
    assert waited > 3


def test_declaration_survives_a_crash_of_the_source_at_any_event() -> None:
    event = WALKED.index("driver: Freeze asked")
    begins = len(member_dies(event).model.labels)
    for after in range(12):
        scene = member_dies(event)
        scene.model.faults[begins + after] = lambda world: world.kill(HOME)
        person_says(scene.model, HOME, "DeclareMemberDead", "m-1", PAL)
        scene.model.settle()
        source = scene.move.at_source
        assert source is not None
        if source.abandoned:
            scene.model.settle(2)
            assert not any(copy.gated for copy in scene.model.members())
        else:
            assert all(copy.gated for copy in scene.model.members())


def test_member_that_was_only_cut_off_gets_errors_when_it_is_back() -> None:
    """Its process lives behind its gate. It must not go on with a communicator that the others do not have."""
    scene = Scene({}, ticking=False, peers=(PEER, PAL))
    scene.model.dead_for_ever.add(PAL)
    scene.model.faults[WALKED.index("driver: Freeze asked")] = lambda world: world.kill(PAL)
    scene.move.run()
    scene.model.settle()
    assert person_says(scene.model, HOME, "DeclareMemberDead", "m-1", PAL)
    scene.model.dead_for_ever.clear()
    scene.model.settle(3)
    assert [copy.lost for copy in scene.model.programs.values()] == [True, True]
    assert leftovers(scene.model) == []


@pytest.mark.parametrize("member", [PEER, AWAY])
def test_member_that_answers_or_is_none_cannot_be_declared_dead(member: str) -> None:
    scene = member_dies(WALKED.index("driver: Freeze asked"))
    assert not person_says(scene.model, HOME, "DeclareMemberDead", "m-1", member)
    assert all(copy.gated for copy in scene.model.members())


def test_member_of_a_move_under_way_cannot_be_declared_dead() -> None:
    scene = Scene({WALKED.index("driver: Freeze asked"): "driver dies"}, ticking=False, peers=(PEER, PAL))
    scene.move.run()
    scene.model.kill(PAL)
    assert not person_says(scene.model, HOME, "DeclareMemberDead", "m-1", PAL)


def test_rank_that_is_lost_while_its_communicator_is_down_leaves_no_gate_closed() -> None:
    """The source has nothing to build it with: it abandons it, and the others get errors."""
    event = WALKED.index("driver: Stream asked")
    scene = Scene({event: "rank dies on source"}, ticking=False, peers=(PEER, PAL)).play()
    assert scene.model.programs[PEER].lost
    assert leftovers(scene.model) == []


# ------------------------------------------------------------ the model itself


def test_gate_that_opens_without_the_word_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim that does not refuse: a node that is told ABORT too early opens in front of a missing communicator."""

    def careless(self: Gating, node: str, copy: Copy, *, abandoned: bool) -> None:
        copy.gated = False

    scene = member_dies(WALKED.index("driver: Freeze asked"))
    monkeypatch.setattr(Gating, "open_gate", careless)
    scene.model.given_up = True  # which excuses a communicator that is not whole, but not a missing one
    scene.model.journal[PEER, gate_of("m-1")].outcome = Outcome.ABORT
    with pytest.raises(Broken, match="in front of a missing communicator"):
        scene.model.settle()


def test_error_that_no_node_has_recorded_is_detected() -> None:
    scene = Scene({}, ticking=False)
    scene.model.given_up = scene.model.programs[PEER].lost = True
    with pytest.raises(Broken, match="no node has abandoned it"):
        scene.model.check()
