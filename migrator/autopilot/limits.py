"""The circuit breaker: why the autopilot may not take a node out of use, or move a rank, now. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from migrator.autopilot.model import OUT, Action, Move, MoveState, Severity
from migrator.autopilot.policy import Policy
from migrator.autopilot.world import World


def node_brake(world: World, policy: Policy, now: float) -> str:
    """Why no further node may be taken out of use by a rule. At least one always may. Maintenance does not count."""
    if reason := systematic(world, policy, now):
        return reason
    out = sum(node.state in OUT and not node.maintenance for node in world.nodes.values())
    limit = max(1.0, len(world.nodes) * policy.breaker.nodes_percent / 100)
    if out + 1 > limit:
        return f"{out} of {len(world.nodes)} nodes are out of use, and the policy allows {int(limit)}"
    return ""


def systematic(world: World, policy: Policy, now: float) -> str:
    """Why the trouble looks like a common cause, which moving ranks would not cure. Empty: it does not.

    Alarms that no rule acts on do not count: a common warning from outside must not keep ranks on failing nodes.
    """
    window = policy.breaker.window_s
    where: dict[str, set[str]] = {}
    for alarm in world.alarms:
        if alarm.severity >= Severity.WARNING and now - alarm.since_unix_s <= window:
            rule = policy.rule_for(alarm)
            if rule is not None and rule.action is not Action.OBSERVE:
                where.setdefault(alarm.check, set()).add(alarm.node)
    for check, nodes in sorted(where.items()):
        if len(nodes) >= policy.breaker.same_alarm_nodes:
            return f"{check} was raised on {len(nodes)} nodes within {window:.0f} s: that looks systematic"
    undone = [move for move in recent(world.moves, now, window) if move.state is MoveState.UNDONE and _counts(move)]
    if len(undone) >= policy.breaker.undone:
        return f"{len(undone)} moves were undone within {window:.0f} s: that looks systematic"
    return ""


def move_brake(world: World, policy: Policy, now: float, more: int = 0) -> str:
    """Why a rule may not move a rank now, and `more` ranks with it."""
    if reason := systematic(world, policy, now):
        return reason
    window = policy.breaker.window_s
    counted = (MoveState.INTENDED, MoveState.MOVED, MoveState.UNDONE)
    begun = [move for move in recent(world.moves, now, window) if _counts(move) and move.state in counted]
    suspended = [one for one in world.suspensions if one.counts and now - one.intended_unix_s <= window]
    if len(begun) + len(suspended) + more >= policy.breaker.moves:
        jobs = f", and {len(suspended)} jobs suspended," if suspended else ""
        return (
            f"{len(begun)} moves were begun{jobs} within {window:.0f} s, and the policy allows {policy.breaker.moves}"
        )
    return ""


def _counts(move: Move) -> bool:
    """Whether a move counts for the limits: what an order moves does not, except for ranks that make room for others."""
    return not move.order or bool(move.makes_room_for)


def recent(moves: Iterable[Move], now: float, window_s: float) -> list[Move]:
    """The moves that are in progress, or ended within the window."""
    return [move for move in moves if not move.ended_unix_s or now - move.ended_unix_s <= window_s]
