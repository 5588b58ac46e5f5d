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
from migrator.autopilot.limits import move_brake, node_brake, recent
from migrator.autopilot.model import (
    FAILED,
    Action,
    Alarm,
    Move,
    MoveState,
    Node,
    NodeState,
    Order,
    Proposal,
    ProposalState,
    Rank,
    Severity,
    cause_class,
)
from migrator.autopilot.outside import PREFIX
from migrator.autopilot.placing import failed_there, held_from, placed, targets_of
from migrator.autopilot.policy import Policy
from migrator.autopilot.preempt import SHOWS_S, STALE_S, Plan, made_room, names_of, plan, taking
from migrator.autopilot.ruled import ruled_for
from migrator.autopilot.spares import Placement, memory_for, place
from migrator.autopilot.suspending import in_progress, to_suspend
from migrator.autopilot.suspension import BUSY, Suspension
from migrator.autopilot.world import World


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
    makes_room_for: str = ""  # uid of the rank that takes its place

    @property
    def cause(self) -> str:
        """What the record names."""
        return f"order {self.order}" if self.order and not self.makes_room_for else self.text


@dataclass(frozen=True)
class AboutRank:
    rank: Rank
    decision: RankDecision
    reason: str
    target: str = ""
    why: Leave = Leave("")
    proposals: tuple[Proposal, ...] = ()  # that concern it, whether they were answered or not
    look_at: str = ""  # a node that must answer again before more can be decided
    suspends: Suspension | None = None  # a job that is suspended first, to make room for it


# ---------------------------------------------------------------------- nodes


def about_node(world: World, policy: Policy, node: Node, now: float) -> AboutNode:
    alarms = ruled_for(world, policy, node.name, now)
    # An alert from outside can be about anything. Only a rule says that it matters here.
    about_it = [one.alarm for one in alarms if one.rule is not None or not one.alarm.check.startswith(PREFIX)]
    serious = [alarm for alarm in about_it if alarm.severity >= Severity.WARNING]
    trouble = f"{serious[0].check} on {serious[0].subject}: {serious[0].text}" if serious else ""
    facts = NodeFacts(
        state=node.state,
        answers=node.seen and node.reachable,
        ranks=len(world.ranks_on(node.name)),
        fresh=node.asked_unix_s >= node.since_unix_s,
        due=alarms[0].action if alarms else Action.OBSERVE,
        cause=alarms[0].cause if alarms else "",
        trouble=trouble or ("" if node.reachable else "its daemon does not answer"),
        brake=node_brake(world, policy, now) if alarms and alarms[0].action is not Action.OBSERVE else "",
        ordered=world.order_for(node.name) is not None,
        probation_over=now - node.since_unix_s >= policy.validation.probation_s,
    )
    decision, reason = node_next(facts)
    return AboutNode(node.name, decision, reason)


# ---------------------------------------------------------------------- ranks


def about_ranks(world: World, policy: Policy, now: float) -> list[AboutRank]:
    """What to do about every rank that must leave its node. The order is that in which moves begin: by priority.

    The moves that this call decides count for the limits at once, so that all of its decisions hold together.
    """
    found: list[AboutRank] = []
    leaving: dict[tuple[str, int, str], list[tuple[Rank, Leave]]] = {}  # by node, order, and where they go back to
    bringing_back = {order.id for order in world.orders if order.brings_back}
    leavable = (NodeState.DRAINING, NodeState.TAINTED)
    troubled = [name for name, node in world.nodes.items() if node.state in leavable]
    # Without an order only ranks on these nodes can have a reason to leave.
    for rank in world.ranks if world.orders else [rank for name in troubled for rank in world.ranks_on(name)]:
        why = _leaves(world, policy, rank, now)
        if why is not None:
            home = rank.home if why.order in bringing_back else ""
            leaving.setdefault((rank.node, why.order, home), []).append((rank, why))
    for members in leaving.values():
        members.sort(key=lambda member: (-policy.job_for(member[0]).priority, member[0].job, member[0].rank))
    groups = sorted(leaving.items(), key=lambda group: (-policy.job_for(group[1][0][0]).priority, group[0]))
    all_leaving = [rank for members in leaving.values() for rank, _ in members]
    for (_, order, _), members in groups:
        ranks = [rank for rank, _ in members]
        placements = placed(world, policy, order, ranks, all_leaving, now)
        reserved = {
            rank.uid: taking(world, rank, target)
            for rank in ranks
            if (target := placements[rank.uid].targets.get(rank.uid)) is not None
        }
        for rank, why in members:
            placement = placements[rank.uid]
            decided = [_about_rank(world, policy, rank, why, placement, now)]
            if decided[0].decision is RankDecision.ALERT and rank.uid not in placement.targets:
                decided = _make_room(world, policy, decided[0], all_leaving, list(reserved.values()), now)
            found += decided
            for about in decided:
                if about.suspends is not None:
                    world = replace(world, suspensions=(*world.suspensions, about.suspends))
                if about.decision is RankDecision.MOVE:
                    world = with_move(world, about, "planned", now)
                    reserved.pop(about.rank.uid, None)
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
        memory_bytes=memory_for(rank, world.nodes.get(rank.node), world.nodes.get(about.target)),
        detected_unix_s=about.why.detected_unix_s,
        cause_class=about.why.cause_class,
        job_gpus=sum(len(other.gpus) for other in world.ranks if other.job_key == rank.job_key),
        makes_room_for=about.why.makes_room_for,
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
    for order in world.orders:
        if order.brings_back and _goes_home(world, order, rank):
            what = f"returned {rank.home}" if order.kind == "return" else "ordered to rebalance"
            return Leave(f"{order.by or 'an operator'} {what}", order.id, order.since_unix_s)
    if node is None or node.state not in (NodeState.DRAINING, NodeState.TAINTED):
        return None
    for one in ruled_for(world, policy, rank.node, now):
        alarm, drains = one.alarm, node.state is NodeState.DRAINING and one.action is Action.DRAIN
        if drains or (one.action is Action.MOVE and concerns(alarm, rank)):
            return Leave(one.cause, 0, alarm.since_unix_s, cause_class(alarm.check, alarm.subject))
    if node.state is NodeState.DRAINING:
        return Leave(f"{rank.node} is being drained: {node.reason}", 0, node.since_unix_s, "unknown")
    return None


def _goes_home(world: World, order: Order, rank: Rank) -> bool:
    """Whether an order brings the rank back to the node where it was started: once that one may be used again."""
    home = world.nodes.get(rank.home)
    if home is None or rank.home == rank.node or order.node not in ("", rank.home):
        return False
    usable = (NodeState.RETURNED,) if order.kind == "return" else (NodeState.RETURNED, NodeState.HEALTHY)
    return home.state in usable and home.reachable and not home.maintenance


def concerns(alarm: Alarm, rank: Rank) -> bool:
    """Whether an alarm is about what the rank uses. One about a whole node is about each of its ranks."""
    kind, _, name = alarm.subject.partition(":")
    if kind == "gpu":
        return name in rank.gpus
    if kind == "rank":
        return name == rank.uid
    return True


def _about_rank(
    world: World,
    policy: Policy,
    rank: Rank,
    why: Leave,
    placement: Placement,
    now: float,
    brake: str | None = None,  # None: it is looked up
) -> AboutRank:
    # An order about one rank does not overrule the limits for another one that makes room for it.
    number = 0 if why.makes_room_for else why.order
    order = next((order for order in world.orders if order.id == number), None)
    job = policy.job_for(rank)
    # Not those from other nodes: a node that claims the rank must not use up its attempts.
    mine = [move for move in world.moves if move.rank_uid == rank.uid and rank.node in (move.source, move.target)]
    moved = [move.ended_unix_s for move in mine if move.state is MoveState.MOVED]
    # An order begins anew: what failed before it was given does not count.
    window = now - order.since_unix_s if order is not None else policy.breaker.window_s
    failed = [move for move in recent(mine, now, window) if move.state in FAILED]
    undone = [move.ended_unix_s for move in failed]
    others = [move for move in world.running if move.job_key == rank.job_key and move.rank_uid != rank.uid]
    facts = RankFacts(
        leaves=why.text,
        ordered=order is not None,
        node_answers=world.nodes[rank.node].reachable,
        moving=rank.moving or next((move.id for move in mine if move.state is MoveState.INTENDED), ""),
        suspending=any(one.state in BUSY and one.job_key == rank.job_key for one in world.suspensions),
        opted_out=not job.move and not (order is not None and order.kind == "evacuate"),
        job_moves=str(others[0].rank) if others and not job.independent else "",
        moved_s_ago=now - max(moved) if moved else None,
        rank_window_s=policy.breaker.rank_window_s,
        failures=len(failed),
        # Who ordered one move looks at what became of it, and may order another one.
        failure_limit=1 if order is not None and order.kind == "move" else policy.breaker.undone,
        back_off_s=policy.breaker.back_off_s - (now - max(undone)) if undone else 0.0,
        brake=move_brake(world, policy, now) if brake is None else brake,
        target=placement.targets.get(rank.uid, ""),
        placement=placement.reason,
    )
    decision, reason = rank_next(facts)
    return AboutRank(rank, decision, reason, facts.target if decision is RankDecision.MOVE else "", why)


# ---------------------------------------------------------------------- making room


def _make_room(
    world: World, policy: Policy, about: AboutRank, leaving: list[Rank], reserved: list[Move], now: float
) -> list[AboutRank]:
    """What to do about a rank that fits on no spare: it takes a place that was freed for it, or ranks of a lower priority
    are moved out of its way first, if the policy allows that. `reserved`: places of other ranks that leave its node."""
    rank, why = about.rank, about.why
    order = next((order for order in world.orders if order.id == why.order), None)
    if policy.spares.preempt == "never" or policy.spares.gang == "require":
        return [about]
    if order is not None and (order.brings_back or order.kind == "move"):
        return [about]  # it may as well stay where it is
    if not lacks_place(world, policy, about, now):
        return [about]  # something else keeps it where it is
    failed, room = failed_there(world, policy, now), made_room(world, rank, now)
    only = targets_of(order, rank)
    held = [*reserved, *(one for one in held_from(world, policy, leaving, [rank], now) if one.rank_uid != rank.uid)]
    freed = {move.source for move in room if move.state is MoveState.MOVED and move.source in world.nodes}
    if freed:
        fits = place(world, [rank], policy.spares, only=freed, avoid=failed, held=held)
        if target := fits.targets.get(rank.uid):
            there = Placement(fits.targets, f"room was made for it on {target}")
            return [_about_rank(world, policy, rank, why, there, now)]
    fresh = [move for move in room if not move.ended_unix_s or now - move.ended_unix_s <= SHOWS_S]
    for move in fresh:
        if move.ended_unix_s and world.nodes[move.source].asked_unix_s < move.ended_unix_s + STALE_S:
            return [_waits(about, f"{move.source} has not said yet that it has room", look_at=move.source)]
    asked = tuple(one for one in world.proposals if one.key.startswith(_key(rank)))

    def may_leave(one: Rank) -> bool:
        return one not in leaving and _may_make_room(world, policy, one, _out_of_the_way(policy, one, about), now)

    found, reason = plan(
        world,
        policy,
        rank,
        now,
        only={move.source for move in fresh} or only,
        may_leave=may_leave,
        failed=failed,
        rejected=lambda one: any(p.key == _key(rank, one) and p.state is ProposalState.REJECTED for p in asked),
        held=held,
    )
    if found is None:
        if fresh:
            return [_waits(about, "room is being made for it", look_at=fresh[0].source)]
        about = replace(about, reason=f"{about.reason}, and {reason}")
        if policy.spares.preempt != "suspend":
            return [about]
        if busy := in_progress(world):
            return [_waits(about, f"job {busy.job} is being suspended or resumed")]
        job, reason = to_suspend(
            world, policy, rank, now, only=only, may_leave=may_leave, failed=failed, held=held, order=why.order
        )
        if job is None:
            return [replace(about, reason=f"{about.reason}; {reason}")]
        if brake := move_brake(world, policy, now, 1):
            return [replace(about, reason=f"{about.reason}; no job can be suspended: {brake}")]
        return [replace(_waits(about, f"job {job.job} must be suspended first"), suspends=job)]
    brake = move_brake(world, policy, now, len(found.leave))
    if brake:
        return [replace(about, reason=f"{about.reason}; others cannot make room: {brake}")]
    if policy.spares.preempt == "propose":
        known = world.proposal(_key(rank, found)) or _proposal(about, found, reason)
        if known.waits:
            return [
                replace(about, reason=f"{about.reason}; to make room, {known.what}: {known.waits}", proposals=(known,))
            ]
    decided = []
    for one, target in found.leave:
        there = Placement({one.uid: target}, f"{target} has room for it")
        decided.append(_about_rank(world, policy, one, _out_of_the_way(policy, one, about), there, now))
        if decided[-1].decision is RankDecision.MOVE:
            world = with_move(world, decided[-1], "planned", now)
    names = names_of([one for one, _ in found.leave]) or "another rank"
    return [*decided, _waits(about, f"{names} must leave {found.node} first")]


def _waits(about: AboutRank, reason: str, look_at: str = "") -> AboutRank:
    return replace(about, decision=RankDecision.WAIT, reason=f"{about.why.text}; {reason}", look_at=look_at)


def _out_of_the_way(policy: Policy, one: Rank, about: AboutRank) -> Leave:
    higher, lower = policy.job_for(about.rank).priority, policy.job_for(one).priority
    text = f"moved out of the way for rank {about.rank.rank} of {about.rank.job} (priority {higher} > {lower})"
    # "planned": nothing is wrong where it is, so it is no failure that the move resolves.
    return Leave(text, about.why.order, about.why.detected_unix_s, "planned", makes_room_for=about.rank.uid)


def _may_make_room(world: World, policy: Policy, one: Rank, why: Leave, now: float) -> bool:
    """Whether nothing keeps a rank where it is, except perhaps the breaker, or a move of another rank of its job."""
    would = _about_rank(world, policy, one, why, Placement({one.uid: "a place"}, ""), now, brake="")
    return would.decision in (RankDecision.MOVE, RankDecision.WAIT)


def lacks_place(world: World, policy: Policy, about: AboutRank, now: float) -> bool:
    """Whether nothing keeps a rank that must leave where it is, except that no node has room for it."""
    there = Placement({about.rank.uid: "a place"}, "")
    return _about_rank(world, policy, about.rank, about.why, there, now).decision is RankDecision.MOVE


def _key(rank: Rank, found: Plan | None = None) -> str:
    """Names a proposal to make room. Without a plan: what the keys of all those for this rank begin with."""
    return f"preempt {rank.uid} on {rank.node}: " + (f"{found.node} without {', '.join(found.uids)}" if found else "")


def _proposal(about: AboutRank, found: Plan, reason: str) -> Proposal:
    moves = " and ".join(f"rank {one.rank} of {one.job} from {found.node} to {to}" for one, to in found.leave)
    rank = about.rank
    what = f"move {moves}, and then rank {rank.rank} of {rank.job} from {rank.node} to {found.node}"
    return Proposal(0, _key(rank, found), what, f"{about.reason}; {reason}", rank.node)


def proposed(world: World, policy: Policy, decided: Iterable[AboutRank], now: float) -> dict[str, Proposal]:
    """Everything that an operator must approve or has answered, by key, as long as its cause is there."""
    asking = any(rule.approval for rule in policy.rules)
    alarms = [one for name in world.nodes for one in ruled_for(world, policy, name, now)] if asking else []
    found = [one.proposal for one in alarms if one.proposal is not None]
    for about in decided:  # an answer holds until the rank has left
        answered = [one for one in world.proposals if one.state is not ProposalState.OPEN]
        found += [*about.proposals, *(one for one in answered if one.key.startswith(_key(about.rank)))]
    return {one.key: one for one in found}
