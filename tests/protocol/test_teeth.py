"""The walk can fail: each rule, broken on purpose, is caught by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from migrator.protocol import Verdict
from snapshotd.rules import (
    CopyState,
    Mark,
    Outcome,
    SourceDecision,
    SourceFacts,
    TargetDecision,
    TargetFacts,
    source_next,
    target_next,
)
from tests.protocol import settling
from tests.protocol.faults import Scene, labels, single_faults
from tests.protocol.model import Model
from tests.protocol.mover import leftovers
from tests.protocol.network import Broken
from tests.protocol.world import Answer

FAULTS = list(single_faults(back=False, ticking=True))  # of the rules as they are


def caught() -> bool:
    """Whether some single fault brings the break to light."""
    for event, _, name in FAULTS:
        try:
            Scene({event: name}, soon=False).play().judge()
        except AssertionError:
            return True
    return False


def thaw_in_silence(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source goes on alone when a committed target does not answer."""
    committed = facts.outcome is Outcome.COMMIT and facts.mark is not Mark.SETTLED
    if committed and facts.target is CopyState.UNREACHABLE and facts.copy_exists and facts.lease_expired:
        return SourceDecision.THAW, ""
    return source_next(facts)


def release_early(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source drops its copy once it has committed, without asking."""
    if facts.outcome is Outcome.COMMIT and facts.mark is not Mark.SETTLED:
        return SourceDecision.RELEASE, ""
    return source_next(facts)


def abort_though_held(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source whose copy is gone does not look whether the target holds one."""
    if facts.outcome is None and not facts.copy_exists and facts.mark is not Mark.SETTLED:
        return SourceDecision.RECORD_ABORT, ""
    return source_next(facts)


def activate_unasked(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target lets a held copy go without an outcome."""
    if facts.mark is Mark.HELD and facts.copy_exists:
        return TargetDecision.ACTIVATE, ""
    return target_next(facts)


def never_ask(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target drops its copy instead of asking."""
    decision = target_next(facts)
    return (TargetDecision.DISCARD, "") if decision[0] is TargetDecision.ASK_SOURCE else decision


def take_back_in_silence(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source takes a target that does not answer for one whose copy is dead."""
    decision = source_next(facts)
    silent = decision[0] is SourceDecision.ASK_TARGET and facts.outcome is Outcome.COMMIT and facts.lease_expired
    return (SourceDecision.TAKE_BACK, "") if silent else decision


def never_take_back(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source leaves it to a person, though the target's journal says enough."""
    decision = source_next(facts)
    return (SourceDecision.WAIT_FOR_PERSON, "") if decision[0] is SourceDecision.TAKE_BACK else decision


def activate_the_dead(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target marks ACTIVATED for the token alone, although it has said, or may have said, that its copy is dead."""
    if facts.mark is Mark.HELD and facts.outcome is Outcome.COMMIT:
        return TargetDecision.ACTIVATE, ""
    return target_next(facts)


SOURCE_BREAKS = (thaw_in_silence, release_early, abort_though_held, take_back_in_silence, never_take_back)
TARGET_BREAKS = (activate_unasked, never_ask, activate_the_dead)
BREAKS = [("source_next", broken) for broken in SOURCE_BREAKS] + [("target_next", broken) for broken in TARGET_BREAKS]


@pytest.mark.parametrize(("side", "broken"), BREAKS, ids=[broken.__name__ for _, broken in BREAKS])
def test_a_broken_rule_is_caught(monkeypatch: pytest.MonkeyPatch, side: str, broken: Callable[..., object]) -> None:
    monkeypatch.setattr(settling, side, broken)
    assert caught()


def gone_under_its_hands() -> Scene:
    event = labels(back=False, ticking=False).index("target: mark activated")
    return Scene({event: "guest keeper dies on target, the source asks"}, ticking=False).play()


def test_a_copy_that_dies_while_it_is_let_go_is_not_said_to_be_dead_unrun() -> None:
    gone_under_its_hands().judge()


def test_an_answer_given_between_the_decision_to_let_go_and_its_mark_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """GONE without the move's lock: the source takes the rank back, and the target writes ACTIVATED all the same."""
    monkeypatch.setattr(Model, "at_work", lambda self, node, move: nullcontext())
    with pytest.raises(Broken, match="said to be dead and unrun is let go"):
        gone_under_its_hands()


def test_a_refused_begin_whose_abort_nobody_can_prove_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source journals ABORT for a move it never knew, without the target's nonce: the target never believes it."""

    def on_getoutcome(self: Model, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        return Answer("NOT FOUND") if record is None else self.outcome_of(record, move)

    monkeypatch.setattr(Model, "on_getoutcome", on_getoutcome)
    begin = labels(back=False, ticking=False).index("driver: Begin asked")
    assert "m-1 unfinished on away" in leftovers(Scene({begin: "request lost"}).play().model)


def lost_commit() -> Scene:
    """The frozen rank is killed while the target holds a whole copy; Commit is lost, so the driver asks for Abort."""
    events = labels(back=False, ticking=False)
    faults = {events.index("target: Restore answered"): "rank dies on source"}
    return Scene({**faults, events.index("driver: Commit asked"): "request lost"}, ticking=False).play()


def test_an_abort_where_the_copy_is_gone_asks_the_target_first() -> None:
    scene = lost_commit()
    assert scene.move.verdict is Verdict.MOVED
    scene.judge()


def test_an_abort_that_does_not_look_whether_the_copy_is_gone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_abort(self: Model, node: str, move: str) -> Answer:
        self.record_outcome(node, self.journal[node, move], Outcome.ABORT)
        self.settle_source(node, move)
        return self.on_getoutcome(node, move)

    monkeypatch.setattr(Model, "on_abort", on_abort)
    with pytest.raises(AssertionError, match="lost without need"):
        lost_commit().judge()


def test_a_begin_that_never_arrived_is_undone_not_unknown() -> None:
    """Abort of a move the source does not know writes ABORT, which a Begin that arrives later finds."""
    begin = labels(back=False, ticking=False).index("driver: Begin asked")
    for name in ("request lost", "request late"):
        scene = Scene({begin: name}).play()
        assert scene.move.verdict is Verdict.UNDONE
        scene.judge()


def test_a_commit_that_overwrites_an_outcome_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_commit(self: Model, node: str, move: str, receipt: bytes) -> Answer:
        self.journal[node, move].outcome = Outcome.COMMIT
        return self.on_getoutcome(node, move)

    monkeypatch.setattr(Model, "on_commit", on_commit)
    assert caught()
