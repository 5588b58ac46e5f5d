"""Mutation tests of the protocol: each rule is broken on purpose, and the walk has to detect it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from migrator.protocol import Verdict
from snapshotd.moves.rules import (
    CopyState,
    GateDecision,
    GateFacts,
    Mark,
    Outcome,
    PeerDecision,
    PeerFacts,
    SourceDecision,
    SourceFacts,
    TargetDecision,
    TargetFacts,
    gate_next,
    peer_next,
    source_next,
    target_next,
)
from tests.protocol import peering, settling
from tests.protocol.faults import Scene, labels, single_faults
from tests.protocol.gating import Gating, gate_of
from tests.protocol.model import Model
from tests.protocol.mover import leftovers
from tests.protocol.network import PEER, Broken, Copy, Network
from tests.protocol.world import Answer, Record

FAULTS = sorted(
    single_faults(back=False, ticking=True), key=lambda fault: fault[0] * 37 % 83
)  # of the unmodified rules


def caught() -> bool:
    """Whether some single fault reveals the broken rule."""
    for event, _, name in FAULTS:
        try:
            Scene({event: name}, soon=False).play().judge(retry=event % 8 == 0)
        except AssertionError:
            return True
    return False


def thaw_in_silence(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source thaws its copy when a committed target does not answer."""
    committed = facts.outcome is Outcome.COMMIT and facts.mark is not Mark.SETTLED
    if committed and facts.target is CopyState.UNREACHABLE and facts.copy_exists and facts.lease_expired:
        return SourceDecision.THAW, ""
    return source_next(facts)


def release_early(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source drops its copy once it has committed, without asking the target."""
    if facts.outcome is Outcome.COMMIT and facts.mark is not Mark.SETTLED:
        return SourceDecision.RELEASE, ""
    return source_next(facts)


def abort_though_held(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """A source whose copy is gone does not ask whether the target holds one."""
    if facts.outcome is None and not facts.copy_exists and facts.mark is not Mark.SETTLED:
        return SourceDecision.RECORD_ABORT, ""
    return source_next(facts)


def activate_unasked(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target activates a held copy without an outcome."""
    if facts.mark is Mark.HELD and facts.copy_exists:
        return TargetDecision.ACTIVATE, ""
    return target_next(facts)


def never_ask(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target drops its copy instead of asking the source."""
    decision = target_next(facts)
    return (TargetDecision.DISCARD, "") if decision[0] is TargetDecision.ASK_SOURCE else decision


def take_back_in_silence(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source treats a target that does not answer as one whose copy is dead."""
    decision = source_next(facts)
    silent = decision[0] is SourceDecision.ASK_TARGET and facts.outcome is Outcome.COMMIT and facts.lease_expired
    return (SourceDecision.TAKE_BACK, "") if silent else decision


def never_take_back(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """The source waits for an operator although the target's report is sufficient."""
    decision = source_next(facts)
    return (SourceDecision.WAIT_FOR_PERSON, "") if decision[0] is SourceDecision.TAKE_BACK else decision


def activate_the_dead(facts: TargetFacts) -> tuple[TargetDecision, str]:
    """The target marks ACTIVATED because of the token, although it may have reported that its copy is dead."""
    if facts.mark is Mark.HELD and facts.outcome is Outcome.COMMIT:
        return TargetDecision.ACTIVATE, ""
    return target_next(facts)


def commit_without_the_driver(facts: SourceFacts) -> tuple[SourceDecision, str]:
    """A source whose copy is gone commits at once, although the peers are not re-pointed yet."""
    return source_next(replace(facts, lease_expired=True) if not facts.copy_exists else facts)


def believe_commit(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The peer removes its filters for a COMMIT that can still be overruled."""
    decision = peer_next(facts)
    return (PeerDecision.LEARN_COMMIT, "") if facts.source is Outcome.COMMIT and not facts.outcome else decision


def unfilter_in_silence(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The peer does not wait for the outcome."""
    decision = peer_next(facts)
    return (PeerDecision.UNFILTER, "") if decision[0] is PeerDecision.ASK else decision


def stay_pointed(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The peer removes its filters after ABORT without pointing back."""
    decision = peer_next(facts)
    return (PeerDecision.UNFILTER, "") if decision[0] is PeerDecision.POINT_BACK else decision


def forget_the_filter(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The peer treats ends that it has only filtered as untouched."""
    filtered = facts.mark is Mark.FILTERED and facts.outcome is not None
    return (PeerDecision.CLOSE, "") if filtered else peer_next(facts)


def leave_behind(facts: PeerFacts) -> tuple[PeerDecision, str]:
    """The peer does not re-point ends that it has only filtered after a COMMIT without the driver."""
    filtered = facts.mark is Mark.FILTERED and facts.outcome is not None
    return (PeerDecision.UNFILTER, "") if filtered else peer_next(facts)


def open_in_silence(facts: GateFacts) -> tuple[GateDecision, str]:
    """The gate does not wait for the outcome."""
    decision = gate_next(facts)
    return (GateDecision.LEARN_ABORT, "") if decision[0] is GateDecision.ASK else decision


def open_at_abort(facts: GateFacts) -> tuple[GateDecision, str]:
    """The gate opens for an ABORT that is not carried out yet, so the communicators do not exist."""
    decision = gate_next(facts)
    return (GateDecision.LEARN_ABORT, "") if facts.source is Outcome.ABORT and not facts.outcome else decision


def never_open(facts: GateFacts) -> tuple[GateDecision, str]:
    """The gate opens only at the driver's request."""
    decision = gate_next(facts)
    return (GateDecision.ASK, "") if decision[0] in (GateDecision.LEARN_ABORT, GateDecision.LEARN_COMMIT) else decision


def open_in_any_case(self: Gating, node: str, copy: Copy, *, abandoned: bool) -> None:
    """A shim of an older version, which does not refuse: the rules must hold without it."""
    self.event(node, "open its gate")
    copy.gated = False


GATE_BREAKS = (open_in_silence, open_at_abort, never_open)
SOURCE_BREAKS = (thaw_in_silence, release_early, abort_though_held, take_back_in_silence, never_take_back)
TARGET_BREAKS = (activate_unasked, never_ask, activate_the_dead)
PEER_BREAKS = (believe_commit, unfilter_in_silence, stay_pointed, forget_the_filter, leave_behind)
BREAKS = {
    "settling.source_next": SOURCE_BREAKS,
    "settling.target_next": TARGET_BREAKS,
    "peering.peer_next": PEER_BREAKS,
    "gating.gate_next": GATE_BREAKS,
}


@pytest.mark.parametrize(
    ("side", "broken"),
    [pytest.param(side, broken, id=broken.__name__) for side, some in BREAKS.items() for broken in some],
)
def test_broken_rule_is_detected(monkeypatch: pytest.MonkeyPatch, side: str, broken: Callable[..., object]) -> None:
    monkeypatch.setattr(f"tests.protocol.{side}", broken)
    if side == "gating.gate_next":
        monkeypatch.setattr(Gating, "open_gate", open_in_any_case)
    assert caught()


def test_commit_before_peers_are_re_pointed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With peers of an older version, which filter only in Repoint. Others re-point by themselves after such a COMMIT."""
    monkeypatch.setattr(Model, "on_hold", lambda *_: Answer())
    held = labels(back=False, ticking=True).index("target: Restore answered")
    assert not Scene({held: "rank dies on source"}).play().model.severed
    monkeypatch.setattr(settling, "source_next", commit_without_the_driver)
    assert Scene({held: "rank dies on source"}).play().model.severed


def test_peer_that_does_not_filter_from_the_freeze_on_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    held = labels(back=False, ticking=True).index("target: Restore answered")
    assert not Scene({held: "source node reboots"}).play().model.severed
    monkeypatch.setattr(Model, "on_hold", lambda *_: Answer())
    assert Scene({held: "source node reboots"}).play().model.severed


def test_peer_that_leaves_its_process_stopped_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon dies while it changes a socket, and source and target are unreachable for a long time."""

    def never_mend(facts: PeerFacts) -> tuple[PeerDecision, str]:
        return peer_next(replace(facts, interrupted=False))

    monkeypatch.setattr(peering, "peer_next", never_mend)
    event = labels(back=False, ticking=False).index("peer: put it together")
    scene = Scene({event: "peer daemon dies"}, ticking=False, soon=False)
    scene.move.run()
    scene.model.cuts |= {frozenset((scene.source, PEER)), frozenset((scene.target, PEER))}
    with pytest.raises(Broken, match="waits for more than its own connection"):
        scene.model.settle()


# ------------------------------------------------------------ the order of filters and other actions


def note_too_late(self: Model, node: str, move: str) -> Answer:
    """The source journals the connections only after it has filtered them."""
    record = self.undecided(node, move, Mark.BEGUN)
    assert record.copy is not None
    self.mark(node, record, Mark.FREEZING)
    record.copy.running = False
    self.event(node, "filter")
    for peer in self.peers:
        self.hold(node, move, peer, node)
    self.mark(node, record, Mark.FROZEN)
    record.rewires = self.peers
    return Answer(peers=record.rewires)


def let_go_first(self: Model, node: str, move: str, record: Record, why: str) -> None:
    """The filters of a copy are removed before it is killed."""
    self.event(node, "let packets go")
    self.drop_filters(node, move)
    self.event(node, why)
    if record.copy is not None:
        self.kill_silently(record.copy)


def thaw_as_it_is(self: Model, node: str, move: str, record: Record) -> None:
    """The source's copy is thawed with its sockets in the state in which a killed criu left them."""
    self.event(node, "thaw")
    self.drop_filters(node, move)
    if record.copy is not None and record.copy.alive:
        record.copy.running = True


def change_unfiltered(self: Model, node: str, move: str, peer: str, *others: str) -> None:
    """Peers change sockets without a filter."""
    if node not in self.peers:
        Network.hold(self, node, move, peer, *others)


def open_first(self: Model, node: str, move: str, record: Record) -> None:
    """The source has the gates opened before it restores the communicators."""
    self.open_all(node, move, record)
    Gating.put_back(self, node, move, record)


def forget_the_members(self: Model, node: str, move: str, record: Record) -> None:
    """The source does not restore the communicators."""


def close_late(self: Model, node: str, move: str) -> Record:
    """The state of the move is not checked."""
    return self.journal[node, gate_of(move)]


GATE_ORDERS = {"put_back": (open_first, forget_the_members), "still_closed": (close_late,)}


@pytest.mark.parametrize(
    ("act", "order"), [pytest.param(act, one, id=one.__name__) for act, some in GATE_ORDERS.items() for one in some]
)
def test_wrong_order_at_the_gates_is_detected(
    monkeypatch: pytest.MonkeyPatch, act: str, order: Callable[..., object]
) -> None:
    monkeypatch.setattr(Model, act, order)
    assert caught()


ORDERS = {"on_freeze": note_too_late, "drop_copy": let_go_first, "let_go": thaw_as_it_is, "hold": change_unfiltered}


@pytest.mark.parametrize("act", ORDERS)
def test_wrong_order_of_packet_filters_is_detected(monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    monkeypatch.setattr(Model, act, ORDERS[act])
    assert caught()


def gone_under_its_hands() -> Scene:
    event = labels(back=False, ticking=False).index("target: mark activated")
    return Scene({event: "guest keeper dies on target, the source asks"}, ticking=False).play()


def test_copy_that_dies_during_activation_is_not_reported_as_never_run() -> None:
    gone_under_its_hands().judge()


def test_answer_between_the_decision_to_activate_and_its_mark_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """GONE is answered without the move's lock: the source takes the rank back, and the target still writes ACTIVATED."""
    monkeypatch.setattr(Model, "at_work", lambda self, node, move: nullcontext())
    with pytest.raises(Broken, match="said to be dead and unrun is let go"):
        gone_under_its_hands()


def test_abort_without_a_provable_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source journals ABORT for an unknown move, without the target's nonce, so the target never accepts it."""

    def on_getoutcome(self: Model, node: str, move: str) -> Answer:
        record = self.journal.get((node, move))
        return Answer("NOT FOUND") if record is None else self.outcome_of(record, move)

    monkeypatch.setattr(Model, "on_getoutcome", on_getoutcome)
    begin = labels(back=False, ticking=False).index("driver: Begin asked")
    assert "m-1 unfinished on away" in leftovers(Scene({begin: "request lost"}).play().model)


def lost_commit() -> Scene:
    """The frozen rank is killed while the target holds a complete copy. Commit is lost, so the driver calls Abort."""
    events = labels(back=False, ticking=False)
    faults = {events.index("target: Restore answered"): "rank dies on source"}
    return Scene({**faults, events.index("driver: Commit asked"): "request lost"}, ticking=False).play()


def test_abort_asks_the_target_first_if_the_copy_is_gone() -> None:
    scene = lost_commit()
    assert scene.move.verdict is Verdict.MOVED
    scene.judge()


def test_abort_that_ignores_a_lost_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_abort(self: Model, node: str, move: str) -> Answer:
        self.record_outcome(node, self.journal[node, move], Outcome.ABORT)
        self.settle_source(node, move)
        return self.on_getoutcome(node, move)

    monkeypatch.setattr(Model, "on_abort", on_abort)
    with pytest.raises(AssertionError, match="lost without need"):
        lost_commit().judge()


def test_begin_that_never_arrived_is_undone_and_not_unknown() -> None:
    """Abort of a move that the source does not know records ABORT, which makes a later Begin fail."""
    begin = labels(back=False, ticking=False).index("driver: Begin asked")
    for name in ("request lost", "request late"):
        scene = Scene({begin: name}).play()
        assert scene.move.verdict is Verdict.UNDONE
        scene.judge()


def test_commit_that_overwrites_an_outcome_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_commit(self: Model, node: str, move: str, receipt: bytes) -> Answer:
        self.journal[node, move].outcome = Outcome.COMMIT
        return self.on_getoutcome(node, move)

    monkeypatch.setattr(Model, "on_commit", on_commit)
    assert caught()
