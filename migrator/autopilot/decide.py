"""Decides what to do about a node and about a rank: pure functions from facts to (decision, reason).

Invariant: without a rule that acts, or an operator's order, nothing is changed. A rank is moved only away from a node in
trouble and never to one. Every limit of the policy stops the autopilot; none of them makes it act. An operator's order
overrules waiting times, hours and the circuit breaker, because a person has decided, but not the rules of a move itself.

No I/O here. facts.py gathers the facts from a World and the policy, engine.py carries the decisions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from migrator.autopilot.model import Action, NodeState


class NodeDecision(StrEnum):
    KEEP = "keep"
    SUSPECT = "suspect"
    CLEAR = "clear"  # suspect → healthy
    TAINT = "taint"
    DRAIN = "drain"
    DRAINED = "drained"
    REPAIRING = "repairing"
    TRUST = "trust"  # returned → healthy
    ALERT = "alert"  # a person must look: the autopilot may not act


@dataclass(frozen=True)
class NodeFacts:
    state: NodeState
    answers: bool = True
    ranks: int = 0
    fresh: bool = True  # its ranks were looked at since the state began
    due: Action = Action.OBSERVE  # the strongest action that a rule asks for now
    cause: str = ""  # the rule and the alarm that ask for it
    trouble: str = ""  # an alarm of severity warning or above, or silence
    brake: str = ""  # why no further node may be taken out of use
    ordered: bool = False  # an operator asked for it to be emptied
    probation_over: bool = False


def node_next(facts: NodeFacts) -> tuple[NodeDecision, str]:
    """The next state of one node, and the reason as text."""
    match facts.state:
        case NodeState.VALIDATING:
            return NodeDecision.KEEP, "the validation decides"
        case NodeState.REPAIRING:
            return NodeDecision.KEEP, "an operator ends the repair with `migrator return`"
        case NodeState.DRAINED if not facts.answers:
            return NodeDecision.REPAIRING, "it was drained and does not answer any more"
        case NodeState.DRAINED if facts.ranks:
            return NodeDecision.ALERT, f"it was drained, and {facts.ranks} ranks were started there since"
        case NodeState.DRAINED:
            return NodeDecision.KEEP, "an operator ends it with `migrator return` or `migrator undrain`"
        case NodeState.DRAINING if facts.answers and facts.fresh and not facts.ranks:
            return NodeDecision.DRAINED, "no rank is left"
        case NodeState.DRAINING:
            return NodeDecision.KEEP, f"{facts.ranks} ranks are left" if facts.answers else "it does not answer"
    if facts.ordered:
        return NodeDecision.DRAIN, "an operator ordered it"
    out = facts.state is NodeState.TAINTED
    wanted = {Action.TAINT: NodeDecision.TAINT, Action.MOVE: NodeDecision.TAINT, Action.DRAIN: NodeDecision.DRAIN}
    decision = wanted.get(facts.due)
    if decision is not None and not (out and decision is NodeDecision.TAINT):
        # A tainted node counts as out of use already, so draining it takes no further one.
        return (NodeDecision.ALERT, facts.brake) if facts.brake and not out else (decision, facts.cause)
    if out:
        return NodeDecision.KEEP, "an operator ends the taint with `migrator untaint`"
    if facts.trouble:
        known = facts.state is NodeState.SUSPECT
        return NodeDecision.KEEP if known else NodeDecision.SUSPECT, facts.trouble
    if facts.state is NodeState.SUSPECT:
        return NodeDecision.CLEAR, "it answers, and no alarm is raised any more"
    if facts.state is NodeState.RETURNED and facts.probation_over:
        return NodeDecision.TRUST, "its probation passed without an alarm"
    return NodeDecision.KEEP, "nothing is wrong"


@dataclass(frozen=True)
class StragglerFacts:
    """A rank that the others of its job wait for."""

    lost_s: float  # of the job's time, since it was noticed
    share: float  # that is being lost
    pause_s: float  # that a move is expected to take
    measured: bool  # by an earlier move of the same job; otherwise the policy says so
    confirmed: bool  # by the node of the rank, or by two others
    moved_to: str = ""  # it was moved there for the same reason before


def straggler_waits(facts: StragglerFacts) -> tuple[str, str]:
    """Why a rule about stragglers does not act yet (empty: it acts), and the numbers as text.

    How long a rank will stay slow is not known. To wait until the loss has reached the price of a move, and then to move,
    costs at most twice as much as the best that could have been done (the ski rental problem).
    """
    source = "as the last one did" if facts.measured else "as the policy says"
    numbers = (
        f"{facts.lost_s:.0f} s were lost so far, at {facts.share:.0%} of the job's time, and a move is expected to pause it"
        f" for {facts.pause_s:.0f} s, {source}"
    )
    if facts.moved_to:
        return f"it was moved to {facts.moved_to} for this before, so the cause is not the node", numbers
    if not facts.confirmed:
        return "only one other node says so, which could have invented it", numbers
    if facts.lost_s <= facts.pause_s:
        return numbers, numbers
    return "", numbers


class RankDecision(StrEnum):
    STAY = "stay"
    WAIT = "wait"  # it must leave, but not now; no action is needed
    ALERT = "alert"  # it must leave and cannot: a person must look
    MOVE = "move"


@dataclass(frozen=True)
class RankFacts:
    leaves: str = ""  # why it must leave its node; empty: it need not
    ordered: bool = False  # because an operator asked
    node_answers: bool = True
    moving: str = ""  # id of a move in progress
    suspending: bool = False  # its job is being suspended or resumed
    opted_out: bool = False  # the policy excludes its job
    job_moves: str = ""  # another rank of its job that is being moved
    moved_s_ago: float | None = None  # since the autopilot last moved it
    rank_window_s: float = 0.0
    failures: int = 0  # moves of it that were undone or refused within the window
    failure_limit: int = 3
    back_off_s: float = 0.0  # left to wait after the last one that was undone
    brake: str = ""  # why the autopilot may not move anything now
    target: str = ""
    placement: str = ""  # why that one, or why none


def rank_next(facts: RankFacts) -> tuple[RankDecision, str]:
    """What to do about one rank, and the reason as text."""
    if not facts.leaves:
        return RankDecision.STAY, "nothing is wrong where it is"
    if facts.moving:
        return RankDecision.WAIT, f"it is being moved ({facts.moving})"
    if facts.suspending:
        return RankDecision.WAIT, "its job is being suspended or resumed"
    if not facts.node_answers:
        return RankDecision.ALERT, f"{facts.leaves}, but its node does not answer, so it cannot be moved away"
    if facts.opted_out:
        return RankDecision.ALERT, f"{facts.leaves}, but the policy excludes its job from moves"
    if facts.failures >= facts.failure_limit:
        many = "the move has" if facts.failures == 1 else f"{facts.failures} moves of it have"
        return RankDecision.ALERT, f"{facts.leaves}, but {many} failed"
    if facts.job_moves:
        return RankDecision.WAIT, f"rank {facts.job_moves} of its job is being moved"
    if not facts.ordered:
        if facts.moved_s_ago is not None and facts.moved_s_ago < facts.rank_window_s:
            return RankDecision.ALERT, f"{facts.leaves}, but it was moved {facts.moved_s_ago:.0f} s ago already"
        if facts.brake:
            return RankDecision.ALERT, f"{facts.leaves}, but {facts.brake}"
    if not facts.target:
        # Before the back-off: if there is no other spare, waiting for the back-off would hide that.
        if facts.back_off_s > 0:
            return RankDecision.WAIT, f"the last move was undone; {facts.placement}; retry in {facts.back_off_s:.0f} s"
        return RankDecision.ALERT, f"{facts.leaves}, but {facts.placement}"
    return RankDecision.MOVE, f"{facts.leaves}; {facts.placement}"
