"""Tests the daemons' rules with every combination of facts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from snapshotd.moves.rules import (
    CopyState,
    Mark,
    Outcome,
    PeerDecision,
    PeerFacts,
    SourceDecision,
    SourceFacts,
    TargetDecision,
    TargetFacts,
    peer_next,
    proof,
    proves,
    source_next,
    target_answer,
    target_next,
)

SOURCE_MARKS = (Mark.BEGUN, Mark.FREEZING, Mark.FROZEN, Mark.STREAMED, Mark.SETTLED)
TARGET_MARKS = (Mark.PREPARED, Mark.SEALED, Mark.RESTORING, Mark.HELD, Mark.ACTIVATED, Mark.DISCARDED)
PEER_MARKS = (
    *(Mark.PREPARED, Mark.TIMEOUTS_SUSPENDED, Mark.FILTERED, Mark.REPOINTING),
    *(Mark.REPOINTED, Mark.POINTED_BACK, Mark.SETTLED),
)
OUTCOMES = (None, Outcome.COMMIT, Outcome.ABORT)
BOTH = (False, True)
ALL_SOURCE = [SourceFacts(*facts) for facts in product(SOURCE_MARKS, OUTCOMES, BOTH, BOTH, BOTH, CopyState, BOTH, BOTH)]
ALL_TARGET = [TargetFacts(*facts) for facts in product(TARGET_MARKS, OUTCOMES, BOTH)]
ALL_PEER = [PeerFacts(*facts) for facts in product(PEER_MARKS, OUTCOMES, BOTH, OUTCOMES, CopyState)]
OPEN = [facts for facts in ALL_SOURCE if facts.mark is not Mark.SETTLED]


def test_peer_ends_a_move_that_its_source_never_began() -> None:
    for facts in ALL_PEER:
        unknown = replace(facts, source=None, source_unknowing=True)
        if facts.outcome is None and facts.mark is not Mark.SETTLED and not facts.interrupted:
            decision, _ = peer_next(unknown)
            running = facts.target in (CopyState.RUNNING, CopyState.ENDED)
            changed = facts.mark in (Mark.REPOINTING, Mark.REPOINTED)
            gone = facts.target in (CopyState.NO_SUCH_MOVE, CopyState.DISCARDED)
            held = facts.target is CopyState.HELD
            ended = gone or not (changed or held)
            expected = PeerDecision.LEARN_ABORT if ended else PeerDecision.ASK
            assert decision is (PeerDecision.LEARN_COMMIT if running else expected), unknown


def test_source_always_decides_with_a_reason() -> None:
    for facts in ALL_SOURCE:
        decision, reason = source_next(facts)
        assert isinstance(decision, SourceDecision)
        assert reason


def test_target_always_decides_with_a_reason() -> None:
    for facts in ALL_TARGET:
        decision, reason = target_next(facts)
        assert isinstance(decision, TargetDecision)
        assert reason
        assert target_answer(facts) is not CopyState.UNREACHABLE


def test_settled_move_is_closed() -> None:
    assert {source_next(facts)[0] for facts in ALL_SOURCE if facts.mark is Mark.SETTLED} == {SourceDecision.CLOSE}


def test_source_thaws_only_with_abort_and_releases_only_with_commit() -> None:
    for facts in OPEN:
        decision = source_next(facts)[0]
        if decision is SourceDecision.THAW:
            assert facts.outcome is Outcome.ABORT
            assert facts.copy_exists
        if decision in (SourceDecision.RELEASE, SourceDecision.HAND_TOKEN):
            assert facts.outcome is Outcome.COMMIT
        if decision is SourceDecision.HAND_TOKEN:
            assert facts.target is CopyState.HELD


def test_frozen_copy_is_kept_until_the_target_has_activated_its_own() -> None:
    for facts in OPEN:
        if source_next(facts)[0] is SourceDecision.RELEASE and facts.copy_exists:
            assert facts.target in (CopyState.RUNNING, CopyState.ENDED)


def test_commit_is_overruled_only_if_the_target_reports_that_its_copy_never_ran() -> None:
    for facts in OPEN:
        unrun = facts.target in (CopyState.GONE, CopyState.DISCARDED)
        expected = facts.outcome is Outcome.COMMIT and unrun
        assert (source_next(facts)[0] is SourceDecision.TAKE_BACK) == expected, facts


def test_rank_of_an_overruled_commit_continues_on_the_source() -> None:
    """The target's report overrules the outcome, so the next decision sees ABORT. No operator is needed."""
    for facts in OPEN:
        if source_next(facts)[0] is SourceDecision.TAKE_BACK:
            after = source_next(replace(facts, outcome=Outcome.ABORT))[0]
            assert after is (SourceDecision.THAW if facts.copy_exists else SourceDecision.CLOSE)


def test_copy_reported_dead_is_never_activated() -> None:
    """This holds for any token that arrives later: GONE can only become DISCARDED."""
    for facts in ALL_TARGET:
        if target_answer(facts) in (CopyState.GONE, CopyState.DISCARDED):
            for outcome in OUTCOMES:
                later = replace(facts, outcome=outcome)
                assert target_next(later)[0] is not TargetDecision.ACTIVATE
                assert target_answer(later) is target_answer(facts)


def test_operator_is_needed_only_if_the_target_lost_its_record() -> None:
    for facts in OPEN:
        if facts.target in (CopyState.STORED, CopyState.KEPT):
            continue  # answers about copies of images, never about a rank that moves
        if source_next(facts)[0] is SourceDecision.WAIT_FOR_PERSON:
            if facts.outcome is Outcome.COMMIT:
                assert facts.target in (CopyState.NO_SUCH_MOVE, CopyState.RECEIVING)
            else:
                assert facts.target is CopyState.NO_SUCH_MOVE
                assert facts.restarted
                assert not facts.peers_deny


def test_outcome_is_recorded_only_once() -> None:
    for facts in OPEN:
        if source_next(facts)[0] in (SourceDecision.RECORD_COMMIT, SourceDecision.RECORD_ABORT):
            assert facts.outcome is None


def test_source_commits_by_itself_only_if_the_target_has_the_only_copy_or_has_let_its_copy_run() -> None:
    for facts in OPEN:
        if source_next(facts)[0] is SourceDecision.RECORD_COMMIT:
            ran = facts.target in (CopyState.RUNNING, CopyState.ENDED)
            assert ran or (facts.target is CopyState.HELD and not facts.copy_exists)
            assert facts.lease_expired or facts.target is not CopyState.HELD, "the driver re-points the peers first"


def test_source_never_aborts_what_the_target_runs() -> None:
    """Only a declaration that the source is dead lets the target run its copy without COMMIT."""
    for facts in OPEN:
        if facts.mark is Mark.STREAMED and facts.target in (CopyState.RUNNING, CopyState.ENDED):
            interrupted = facts.interrupted and facts.copy_exists  # cannot be: it was STREAMED
            assert interrupted or source_next(facts)[0] is not SourceDecision.RECORD_ABORT


def test_restarted_source_does_not_let_its_copy_run_before_the_target_has_answered() -> None:
    for facts in OPEN:
        streamed = facts.mark is Mark.STREAMED and not facts.interrupted and facts.outcome is None
        if streamed and facts.restarted and facts.target is CopyState.UNREACHABLE:
            assert source_next(facts)[0] in (SourceDecision.ASK_TARGET, SourceDecision.WAIT)


def test_unreachable_target_that_may_hold_the_last_copy_decides_nothing() -> None:
    for facts in OPEN:
        streamed = facts.mark is Mark.STREAMED and facts.target is CopyState.UNREACHABLE
        if facts.outcome is None and not facts.copy_exists and streamed:
            assert source_next(facts)[0] is SourceDecision.ASK_TARGET


def test_source_with_a_copy_waits_for_the_driver_until_the_lease_expires() -> None:
    for facts in OPEN:
        ran = facts.target in (CopyState.RUNNING, CopyState.ENDED)
        declared = facts.mark is Mark.STREAMED and (ran or facts.restarted)  # this node may have been declared dead
        if facts.outcome is None and facts.copy_exists and not declared:
            expected = SourceDecision.RECORD_ABORT if facts.lease_expired or facts.interrupted else SourceDecision.WAIT
            assert source_next(facts)[0] is expected


def test_target_activates_only_with_commit_and_never_after_abort() -> None:
    for facts in ALL_TARGET:
        decision = target_next(facts)[0]
        if decision is TargetDecision.ACTIVATE:
            assert facts.outcome is Outcome.COMMIT or facts.mark is Mark.ACTIVATED
            assert facts.copy_exists
            assert facts.mark is not Mark.DISCARDED
        if decision is TargetDecision.DISCARD:
            assert facts.outcome is Outcome.ABORT
            assert facts.mark is not Mark.ACTIVATED, "what may have run is not thrown away"


def test_target_without_an_outcome_only_asks() -> None:
    for facts in ALL_TARGET:
        if facts.outcome is None and facts.mark not in (Mark.ACTIVATED, Mark.DISCARDED):
            assert target_next(facts)[0] is TargetDecision.ASK_SOURCE


def test_target_reports_the_state_of_its_copy() -> None:
    for facts in ALL_TARGET:
        answer = target_answer(facts)
        assert (answer is CopyState.HELD) == (facts.mark is Mark.HELD and facts.copy_exists)
        assert (answer in (CopyState.RUNNING, CopyState.ENDED)) == (facts.mark is Mark.ACTIVATED)
        assert (answer is CopyState.GONE) == (facts.mark is Mark.HELD and not facts.copy_exists)


def test_recording_an_outcome_leads_to_another_decision() -> None:
    """Recording an outcome changes the facts so that the next decision is not to record, and settling terminates."""
    recorded = {SourceDecision.RECORD_COMMIT: Outcome.COMMIT, SourceDecision.RECORD_ABORT: Outcome.ABORT}
    for facts in OPEN:
        if outcome := recorded.get(source_next(facts)[0]):
            assert source_next(replace(facts, outcome=outcome))[0] not in recorded


@pytest.mark.parametrize("what", ["HELD", "COMMIT", "ABORT"])
def test_token_is_valid_for_one_outcome_one_move_and_one_nonce(what: str) -> None:
    token = proof(b"nonce", what, "m-1")
    assert proves(token, b"nonce", what, "m-1")
    assert not proves(token, b"nonce", what, "m-2")
    assert not proves(token, b"other", what, "m-1")
    assert not any(proves(token, b"nonce", claim, "m-1") for claim in ("HELD", "COMMIT", "ABORT") if claim != what)
    assert not proves(b"", b"nonce", what, "m-1")


@pytest.mark.parametrize("target", [CopyState.RUNNING, CopyState.ENDED])
def test_target_that_runs_by_declaration_is_recorded_as_committed(target: CopyState) -> None:
    """After --source-is-dead the source node comes back: its own copy is gone, and the target's runs."""
    for facts in OPEN:
        if facts.outcome is None and not facts.copy_exists and facts.target is target:
            assert source_next(facts)[0] is SourceDecision.RECORD_COMMIT, facts


def test_only_a_completely_restored_copy_is_activated() -> None:
    """A process tree that criu had not completely restored is not a rank."""
    for facts in ALL_TARGET:
        if target_next(facts)[0] is TargetDecision.ACTIVATE:
            assert facts.mark in (Mark.HELD, Mark.ACTIVATED), facts


# ------------------------------------------------------------ peers


def test_peer_always_decides_with_a_reason() -> None:
    for facts in ALL_PEER:
        decision, reason = peer_next(facts)
        assert isinstance(decision, PeerDecision)
        assert reason


def test_peer_removes_filters_only_when_its_sockets_match_the_outcome() -> None:
    for facts in ALL_PEER:
        if peer_next(facts)[0] is PeerDecision.UNFILTER:
            unchanged = (Mark.FILTERED, Mark.POINTED_BACK)
            where = {Outcome.COMMIT: (Mark.REPOINTED, Mark.POINTED_BACK), Outcome.ABORT: unchanged}
            assert facts.outcome is not None
            assert facts.mark in where[facts.outcome], facts


def test_peer_gives_up_only_what_it_has_not_changed_and_if_both_are_silent() -> None:
    for facts in ALL_PEER:
        if facts.outcome is None and facts.mark is not Mark.SETTLED:
            without, with_ = peer_next(facts)[0], peer_next(replace(facts, source_lost=True))[0]
            silent = facts.source is None and facts.target is CopyState.UNREACHABLE
            changed = facts.interrupted or facts.mark is Mark.REPOINTED
            assert with_ is (PeerDecision.LEARN_ABORT if silent and not changed else without), facts


def test_peer_without_an_outcome_only_mends_asks_and_learns() -> None:
    harmless = {PeerDecision.MEND, PeerDecision.ASK, PeerDecision.LEARN_COMMIT, PeerDecision.LEARN_ABORT}
    for facts in ALL_PEER:
        if facts.mark is not Mark.SETTLED:
            assert (peer_next(facts)[0] in harmless) == (facts.outcome is None), facts


def test_peer_learns_commit_only_from_a_target_that_runs_the_rank() -> None:
    """A COMMIT that is not carried out yet can be overruled, and a peer records an outcome only once."""
    for facts in ALL_PEER:
        decision = peer_next(facts)[0]
        if decision is PeerDecision.LEARN_COMMIT:
            assert facts.target in (CopyState.RUNNING, CopyState.ENDED)
        if decision is PeerDecision.LEARN_ABORT:
            assert facts.source is Outcome.ABORT or facts.target is CopyState.DISCARDED


def test_peer_learns_nothing_if_source_and_target_are_unreachable() -> None:
    for facts in ALL_PEER:
        if facts.outcome is facts.source is None and facts.target is CopyState.UNREACHABLE:
            expected = PeerDecision.MEND if facts.interrupted else PeerDecision.ASK
            assert facts.mark is Mark.SETTLED or peer_next(facts)[0] is expected


@pytest.mark.parametrize("outcome", [Outcome.COMMIT, Outcome.ABORT])
@pytest.mark.parametrize("mark", [mark for mark in PEER_MARKS if mark is not Mark.POINTED_BACK])
def test_peer_with_an_outcome_always_closes(mark: Mark, outcome: Outcome) -> None:
    """Each action leads to a mark with another decision."""
    marks = {
        PeerDecision.FINISH: Mark.REPOINTED,
        PeerDecision.POINT_BACK: Mark.POINTED_BACK,
        PeerDecision.UNFILTER: Mark.SETTLED,
    }
    for _ in range(3):
        mark = marks.get(peer_next(PeerFacts(mark, outcome))[0], mark)
    assert peer_next(PeerFacts(mark, outcome))[0] is PeerDecision.CLOSE
