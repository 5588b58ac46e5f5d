"""Places the ranks that leave a node, with regard to places that were freed for others (preempt.py). Pure."""

from __future__ import annotations

from collections.abc import Callable

from migrator.autopilot.limits import recent
from migrator.autopilot.model import FAILED, Move, Order, Rank
from migrator.autopilot.policy import Policy
from migrator.autopilot.preempt import held_places, taking
from migrator.autopilot.spares import Placement, place
from migrator.autopilot.world import World


def targets_of(order: Order | None, rank: Rank) -> tuple[str, ...]:
    """The nodes that an order names for a rank."""
    return () if order is None else (rank.home,) if order.brings_back else order.targets


def failed_there(world: World, policy: Policy, now: float) -> Callable[[Rank, str], bool]:
    """Whether a move of the rank to that node has just failed. The node is avoided for a while."""
    recently = recent(world.moves, now, policy.breaker.back_off_s)
    failed = {(move.rank_uid, move.source, move.target) for move in recently if move.state in FAILED}
    return lambda rank, target: (rank.uid, rank.node, target) in failed


def held_from(world: World, policy: Policy, leaving: list[Rank], ranks: list[Rank], now: float) -> list[Move]:
    """The places that were freed for other ranks, and that these ranks do not get: those of a higher priority do."""
    highest = max(policy.job_for(rank).priority for rank in ranks)
    before = [one for one in leaving if policy.job_for(one).priority >= highest]
    return held_places(world, before, now)


def placed(
    world: World, policy: Policy, order: int, ranks: list[Rank], leaving: list[Rank], now: float
) -> dict[str, Placement]:
    """Where ranks go that leave the same node, by uid: together, except if a place was freed for another rank and only those
    of a higher priority get it. Then those go first, and each priority is placed with what is left for it."""
    groups: dict[int, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(policy.job_for(rank).priority, []).append(rank)
    held = {priority: held_from(world, policy, leaving, group, now) for priority, group in groups.items()}
    lowest = held[min(groups)]
    if lowest == held[max(groups)] or policy.spares.gang == "require":
        together = _together(world, policy, order, ranks, now, lowest)
        return {rank.uid: together for rank in ranks}
    found: dict[str, Placement] = {}
    taken: list[Move] = []
    for priority in sorted(groups, reverse=True):
        group = groups[priority]
        placement = _together(world, policy, order, group, now, [*held[priority], *taken])
        taken += [taking(world, rank, placement.targets[rank.uid]) for rank in group if rank.uid in placement.targets]
        found |= {rank.uid: placement for rank in group}
    return found


def _together(
    world: World, policy: Policy, order_id: int, ranks: list[Rank], now: float, held: list[Move]
) -> Placement:
    """Where the ranks of a node go that are not on their way yet. An order brings all of them back to the same node."""
    order = next((order for order in world.orders if order.id == order_id), None)
    on_their_way = {(move.rank_uid, move.source) for move in world.running}
    return place(
        world,
        [rank for rank in ranks if (rank.uid, rank.node) not in on_their_way and not rank.moving],
        policy.spares,
        only=targets_of(order, ranks[0]),
        avoid=failed_there(world, policy, now),
        held=held,
    )
