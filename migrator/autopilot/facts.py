"""Gathers the facts for decide.py from a World, the policy and the time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from migrator.autopilot.decide import (
    NodeDecision,
    NodeFacts,
    RankDecision,
    RankFacts,
    node_next,
    rank_next,
)
from migrator.autopilot.model import (
    FAILED,
    OUT,
    Action,
    Alarm,
    Move,
    MoveState,
    Node,
    NodeState,
    Proposal,
    Rank,
    Severity,
    World,
    cause_class,
)
from migrator.autopilot.policy import Policy
from migrator.autopilot.ruled import ruled_for
from migrator.autopilot.spares import Placement, place


@dataclass(frozen=True)
class AboutNode:
    node: str
    decision: NodeDecision
    reason: str


@dataclass(frozen=True)
class Leave:
    """Why a rank must leave its node."""

    text: str
    order: int = 0  # the operator's order; 0: a rule asks for it
    detected_unix_s: float = 0.0
    cause_class: str = "planned"

    @property
    def cause(self) -> str:
        """What the record names."""
        return f"order {self.order}" if self.order else self.text


@dataclass(frozen=True)
class AboutRank:
    rank: Rank
    decision: RankDecision
    reason: str
    target: str = ""
    why: Leave = Leave("")
    proposals: tuple[Proposal, ...] = ()  # that concern it, whether they were answered or not


# ---------------------------------------------------------------------- nodes


def about_node(world: World, policy: Policy, node: Node, now: float) -> AboutNode:
    alarms = ruled_for(world, policy, node.name, now)
    serious = [one.alarm for one in alarms if one.alarm.severity >= Severity.WARNING]
    trouble = f"{serious[0].check} on {serious[0].subject}: {serious[0].text}" if serious else ""
    facts = NodeFacts(
        state=node.state,
        answers=node.seen and node.reachable,
        ranks=len(world.ranks_on(node.name)),
        fresh=node.asked_unix_s >= node.since_unix_s,
        due=alarms[0].action if alarms else Action.OBSERVE,
        cause=alarms[0].cause if alarms else "",
        trouble=trouble or ("" if node.reachable else "its daemon does not answer"),
        brake=_node_brake(world, policy, now) if alarms and alarms[0].action is not Action.OBSERVE else "",
        ordered=world.order_for(node.name) is not None,
        probation_over=now - node.since_unix_s >= policy.validation.probation_s,
    )
    decision, reason = node_next(facts)
    return AboutNode(node.name, decision, reason)


def _node_brake(world: World, policy: Policy, now: float) -> str:
    """Why no further node may be taken out of use by a rule. At least one always may."""
    if reason := systematic(world, policy, now):
        return reason
    out = sum(node.state in OUT for node in world.nodes.values())
    limit = max(1.0, len(world.nodes) * policy.breaker.nodes_percent / 100)
    if out + 1 > limit:
        return f"{out} of {len(world.nodes)} nodes are out of use, and the policy allows {int(limit)}"
    return ""


def systematic(world: World, policy: Policy, now: float) -> str:
    """Why the trouble looks like a common cause, which moving ranks would not cure. Empty: it does not."""
    window = policy.breaker.window_s
    where: dict[str, set[str]] = {}
    for alarm in world.alarms:
        if alarm.severity >= Severity.WARNING and now - alarm.since_unix_s <= window:
            where.setdefault(alarm.check, set()).add(alarm.node)
    for check, nodes in sorted(where.items()):
        if len(nodes) >= policy.breaker.same_alarm_nodes:
            return f"{check} was raised on {len(nodes)} nodes within {window:.0f} s: that looks systematic"
    undone = [move for move in _recent(world.moves, now, window) if move.state is MoveState.UNDONE and not move.order]
    if len(undone) >= policy.breaker.undone:
        return f"{len(undone)} moves were undone within {window:.0f} s: that looks systematic"
    return ""


# ---------------------------------------------------------------------- ranks


def about_ranks(world: World, policy: Policy, now: float) -> list[AboutRank]:
    """What to do about every rank that must leave its node. The order is that in which moves begin: by priority.

    The moves that this call decides count for the limits at once, so that all of its decisions hold together.
    """
    found: list[AboutRank] = []
    leaving: dict[tuple[str, int], list[tuple[Rank, Leave]]] = {}  # by node and order
    leavable = (NodeState.DRAINING, NodeState.TAINTED)
    troubled = [name for name, node in world.nodes.items() if node.state in leavable]
    # Without an order only ranks on these nodes can have a reason to leave.
    for rank in world.ranks if world.orders else [rank for name in troubled for rank in world.ranks_on(name)]:
        why = _leaves(world, policy, rank, now)
        if why is not None:
            leaving.setdefault((rank.node, why.order), []).append((rank, why))
    for members in leaving.values():
        members.sort(key=lambda member: (-policy.job_for(member[0]).priority, member[0].job, member[0].rank))
    groups = sorted(leaving.items(), key=lambda group: (-policy.job_for(group[1][0][0]).priority, group[0]))
    for (_, order), members in groups:
        placement = _placed(world, policy, order, [rank for rank, _ in members], now)
        for rank, why in members:
            about = _about_rank(world, policy, rank, why, placement, now)
            found.append(about)
            if about.decision is RankDecision.MOVE:
                world = with_move(world, about, "planned", now)
    return found


def with_move(world: World, about: AboutRank, move: str, now: float) -> World:
    """The world in which that move is intended."""
    return replace(world, moves=(*world.moves, intended(world, about, move, now)))


def intended(world: World, about: AboutRank, move: str, now: float) -> Move:
    rank = about.rank
    return Move(
        id=move,
        rank_uid=rank.uid,
        job_key=rank.job_key,
        rank=rank.rank,
        source=rank.node,
        target=about.target,
        state=MoveState.INTENDED,
        cause=about.why.cause,
        reason=about.reason,
        intended_unix_s=now,
        order=about.why.order,
        gpus=len(rank.gpus),
        memory_bytes=rank.memory_bytes + rank.device_bytes,
        detected_unix_s=about.why.detected_unix_s,
        cause_class=about.why.cause_class,
        job_gpus=sum(len(other.gpus) for other in world.ranks if other.job_key == rank.job_key),
    )


def _leaves(world: World, policy: Policy, rank: Rank, now: float) -> Leave | None:
    """Why a rank must leave its node. None: it need not."""
    node = world.nodes.get(rank.node)
    order = world.order_to_move(rank)
    if order is not None:
        return Leave(f"{order.by or 'an operator'} ordered to move it", order.id, order.since_unix_s)
    order = world.order_for(rank.node)
    if order is not None:
        by = order.by or "an operator"
        return Leave(f"{by} ordered to {order.kind} {rank.node}", order.id, order.since_unix_s)
    back = world.nodes.get(rank.home)
    for order in world.orders:  # migrator return
        mine = order.kind == "return" and order.node == rank.home != rank.node
        if mine and back is not None and back.state is NodeState.RETURNED:
            return Leave(f"{order.by or 'an operator'} returned {rank.home}", order.id, order.since_unix_s)
    if node is None or node.state not in (NodeState.DRAINING, NodeState.TAINTED):
        return None
    for one in ruled_for(world, policy, rank.node, now):
        alarm, drains = one.alarm, node.state is NodeState.DRAINING and one.action is Action.DRAIN
        if drains or (one.action is Action.MOVE and concerns(alarm, rank)):
            return Leave(one.cause, 0, alarm.since_unix_s, cause_class(alarm.check, alarm.subject))
    if node.state is NodeState.DRAINING:
        return Leave(f"{rank.node} is being drained: {node.reason}", 0, node.since_unix_s, "unknown")
    return None


def concerns(alarm: Alarm, rank: Rank) -> bool:
    """Whether an alarm is about what the rank uses. One about a whole node is about each of its ranks."""
    kind, _, name = alarm.subject.partition(":")
    if kind == "gpu":
        return name in rank.gpus
    if kind == "rank":
        return name == rank.uid
    return True


def _placed(world: World, policy: Policy, order_id: int, ranks: list[Rank], now: float) -> Placement:
    """Where the ranks of a node go that are not on their way yet. A spare that failed a rank is avoided for a while."""
    order = next((order for order in world.orders if order.id == order_id), None)
    named = () if order is None else (order.node,) if order.kind == "return" else order.targets
    failed = {
        (move.rank_uid, move.target)
        for move in _recent(world.moves, now, policy.breaker.back_off_s)
        if move.state in FAILED and any(move.source == rank.node for rank in ranks)
    }
    on_their_way = {(move.rank_uid, move.source) for move in world.running}
    return place(
        world,
        [rank for rank in ranks if (rank.uid, rank.node) not in on_their_way and not rank.moving],
        policy.spares,
        only=named,
        avoid=lambda rank, target: (rank.uid, target) in failed,
    )


def _about_rank(world: World, policy: Policy, rank: Rank, why: Leave, placement: Placement, now: float) -> AboutRank:
    order = next((order for order in world.orders if order.id == why.order), None)
    job = policy.job_for(rank)
    # Not those from other nodes: a node that claims the rank must not use up its attempts.
    mine = [move for move in world.moves if move.rank_uid == rank.uid and rank.node in (move.source, move.target)]
    moved = [move.ended_unix_s for move in mine if move.state is MoveState.MOVED]
    # An order begins anew: what failed before it was given does not count.
    window = now - order.since_unix_s if order is not None else policy.breaker.window_s
    failed = [move for move in _recent(mine, now, window) if move.state in FAILED]
    undone = [move.ended_unix_s for move in failed]
    others = [move for move in world.running if move.job_key == rank.job_key and move.rank_uid != rank.uid]
    facts = RankFacts(
        leaves=why.text,
        ordered=order is not None,
        node_answers=world.nodes[rank.node].reachable,
        moving=rank.moving or next((move.id for move in mine if move.state is MoveState.INTENDED), ""),
        opted_out=not job.move and not (order is not None and order.kind == "evacuate"),
        job_moves=str(others[0].rank) if others and not job.independent else "",
        moved_s_ago=now - max(moved) if moved else None,
        rank_window_s=policy.breaker.rank_window_s,
        failures=len(failed),
        # Who ordered one move looks at what became of it, and may order another one.
        failure_limit=1 if order is not None and order.kind == "move" else policy.breaker.undone,
        back_off_s=policy.breaker.back_off_s - (now - max(undone)) if undone else 0.0,
        brake=_move_brake(world, policy, now),
        target=placement.targets.get(rank.uid, ""),
        placement=placement.reason,
    )
    decision, reason = rank_next(facts)
    return AboutRank(rank, decision, reason, facts.target if decision is RankDecision.MOVE else "", why)


def proposed(world: World, policy: Policy, decided: Iterable[AboutRank], now: float) -> dict[str, Proposal]:
    """Everything that an operator must approve or has answered, by key, as long as its cause is there."""
    asking = any(rule.approval for rule in policy.rules)
    alarms = [one for name in world.nodes for one in ruled_for(world, policy, name, now)] if asking else []
    found = [one.proposal for one in alarms if one.proposal is not None]
    return {one.key: one for one in (*found, *(one for about in decided for one in about.proposals))}


def _move_brake(world: World, policy: Policy, now: float) -> str:
    """Why a rule may not move a rank now."""
    if reason := systematic(world, policy, now):
        return reason
    window = policy.breaker.window_s
    counted = (MoveState.INTENDED, MoveState.MOVED, MoveState.UNDONE)
    begun = [move for move in _recent(world.moves, now, window) if not move.order and move.state in counted]
    if len(begun) >= policy.breaker.moves:
        return f"{len(begun)} moves were begun within {window:.0f} s, and the policy allows {policy.breaker.moves}"
    return ""


def _recent(moves: Iterable[Move], now: float, window_s: float) -> list[Move]:
    """The moves that are in progress, or ended within the window."""
    return [move for move in moves if not move.ended_unix_s or now - move.ended_unix_s <= window_s]
