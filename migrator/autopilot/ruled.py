"""Which rule matches an alarm, whether it acts now, and if not, why. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from migrator.autopilot.decide import StragglerFacts, straggler_waits
from migrator.autopilot.model import Action, Alarm, Loss, Move, MoveState, Proposal
from migrator.autopilot.policy import Policy, Rule
from migrator.autopilot.world import World

_STRENGTH = list(Action)


@dataclass(frozen=True)
class Ruled:
    """An alarm, the rule that matches it, and why the rule does not act yet (empty: it acts)."""

    alarm: Alarm
    rule: Rule | None
    waits: str
    numbers: str = ""  # of a straggler: what is lost, and what a move costs
    proposal: Proposal | None = None  # what an operator must approve, or has answered

    @property
    def action(self) -> Action:
        return self.rule.action if self.rule is not None and not self.waits else Action.OBSERVE

    @property
    def cause(self) -> str:
        rule = f"rule {self.rule.name}" if self.rule is not None else "no rule"
        numbers = f"; {self.numbers}" if self.numbers else ""
        approved = self.proposal is not None and not self.proposal.waits
        by = f"; {self.proposal.by} approved it" if self.proposal is not None and approved else ""
        return f"{rule}: {self.alarm.check} on {self.alarm.subject}: {self.alarm.text}{numbers}{by}"


def ruled(
    policy: Policy, alarm: Alarm, now: float, moves: Iterable[Move] = (), proposals: Iterable[Proposal] = ()
) -> Ruled:
    rule = policy.rule_for(alarm)
    waits = numbers = ""
    if rule is not None:
        age_s = now - alarm.since_unix_s
        if alarm.count < rule.count:
            waits = f"it was seen {alarm.count} times, and the rule asks for {rule.count}"
        elif age_s < rule.wait_s:
            waits = f"the rule waits for {rule.wait_s - age_s:.0f} s more"
        elif not policy.in_hours(rule, now):
            waits = f"the rule acts only at {', '.join(rule.hours)} ({policy.timezone})"
    if alarm.loss is not None:
        too_early, numbers = straggler_waits(_straggler(policy, alarm, alarm.loss, moves))
        waits = waits or too_early
    found = Ruled(alarm, rule, waits, numbers)
    if rule is None or not rule.approval or rule.action is Action.OBSERVE:
        return found
    wanted = _proposal(rule, alarm, found.cause)
    known = next((proposal for proposal in proposals if proposal.key == wanted.key), None)
    if known is None and waits:
        return found  # it is proposed when the rule would act
    return replace(found, waits=waits or (known or wanted).waits, proposal=known or wanted)


def _proposal(rule: Rule, alarm: Alarm, cause: str) -> Proposal:
    """What is proposed instead of being done. An alarm that is raised anew later needs a new answer."""
    what = {
        Action.TAINT: f"taint {alarm.node}",
        Action.MOVE: f"taint {alarm.node} and move the ranks away that use {alarm.subject}",
        Action.DRAIN: f"drain {alarm.node}",
    }
    key = f"{rule.action} {alarm.node}: rule {rule.name}: {alarm.check} {alarm.subject} {alarm.since_unix_s:.3f}"
    return Proposal(0, key, what[rule.action], cause, alarm.node)


def _straggler(policy: Policy, alarm: Alarm, loss: Loss, moves: Iterable[Move]) -> StragglerFacts:
    """The price of a move is the longest pause of those of the same job that are still known."""
    moved = [move for move in moves if move.state is MoveState.MOVED]
    pauses = [move.pause_s for move in moved if move.job_key == loss.job_key and move.pause_s > 0]
    before = [move.target for move in moved if f"{alarm.check} on {alarm.subject}:" in move.cause]
    return StragglerFacts(
        lost_s=loss.lost_s,
        share=loss.share,
        pause_s=max(pauses, default=policy.progress.pause_s),
        measured=bool(pauses),
        confirmed=loss.confirmed,
        moved_to=before[-1] if before else "",
    )


def ruled_for(world: World, policy: Policy, node: str, now: float) -> list[Ruled]:
    """The alarms of a node with their rules, the strongest first."""
    found = [ruled(policy, alarm, now, world.moves, world.proposals) for alarm in world.alarms_on(node)]
    return sorted(found, key=lambda one: (-_STRENGTH.index(one.action), -one.alarm.severity, one.alarm.since_unix_s))
