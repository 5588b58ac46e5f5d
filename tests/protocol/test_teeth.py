"""The walk can fail: each rule, broken on purpose, is caught by it."""

from __future__ import annotations

from collections.abc import Callable

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


BREAKS = (thaw_in_silence, release_early, abort_though_held, activate_unasked, never_ask)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., object]) -> None:
    side = "source_next" if broken in BREAKS[:3] else "target_next"
    monkeypatch.setattr(settling, side, broken)
    assert caught()


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
