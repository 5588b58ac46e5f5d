"""Finds ranks of lower priority that make room for a rank that must leave its node and fits on no spare. Pure.

Invariant: a rank is displaced only if its job has a lower priority, it may be moved itself, and a spare has room for it now,
so nothing is ever displaced to nowhere and no displacement causes another one. What was freed for a rank is kept for it
by the record of the move that freed it (`Move.makes_room_for`), so a restart between the two moves loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from migrator.autopilot.model import Gpu, Move, MoveState, Node, NodeState, Rank
from migrator.autopilot.policy import Policy
from migrator.autopilot.spares import (
    Room,
    free_spares,
    memory_for,
    needs_of,
    place,
    preference,
    room_on,
    too_few_gpus,
    unfit,
)
from migrator.autopilot.world import World

#: How long a freed place is kept for the rank that it was made for.
KEPT_S = 3600.0
#: How long it may take until a node says that a place was freed. Until then no place is made on another node.
SHOWS_S = 30.0
#: A node reads its GPUs every second, so what it says so soon after a move may be older than the move.
STALE_S = 2.0
#: Nodes that are tried, those where most is free first: with a thousand nodes and many ranks this must end within a second.
TRIED = 16


@dataclass(frozen=True)
class Plan:
    """The ranks that leave a node for another one, with their targets. `before` have left or are leaving it already."""

    node: str
    leave: tuple[tuple[Rank, str], ...]
    before: tuple[str, ...] = ()  # uids

    @property
    def uids(self) -> tuple[str, ...]:
        """All ranks that the plan displaces: it stays the same plan while they leave one after the other."""
        return tuple(sorted({*self.before, *(rank.uid for rank, _ in self.leave)}))


def made_room(world: World, rank: Rank, now: float) -> list[Move]:
    """The moves that make or have made room for the rank since it was moved last."""
    mine = [move for move in world.moves if move.rank_uid == rank.uid and move.state is MoveState.MOVED]
    last = max((move.ended_unix_s for move in mine), default=0.0)
    kept = (MoveState.INTENDED, MoveState.MOVED)
    return [
        move
        for move in (*world.moves, *world.shifts)
        if move.makes_room_for == rank.uid
        and move.state in kept
        and (not move.ended_unix_s or (move.ended_unix_s > last and now - move.ended_unix_s <= KEPT_S))
    ]


def held_places(world: World, ranks: Iterable[Rank], now: float) -> list[Move]:
    """The freed places of ranks that have not begun to move, as moves that will take them."""
    moving = {(move.rank_uid, move.source) for move in world.running}
    if not any(move.makes_room_for for move in (*world.moves, *world.shifts)):
        return []
    freed = [
        (rank, move)
        for rank in ranks
        if not rank.moving and (rank.uid, rank.node) not in moving
        for move in made_room(world, rank, now)[:1]
    ]
    return [taking(world, rank, move.source) for rank, move in freed]


def taking(world: World, rank: Rank, target: str) -> Move:
    """A place that a rank will take, as a move that is not intended yet."""
    return Move(
        id="held",
        rank_uid=rank.uid,
        job_key=rank.job_key,
        rank=rank.rank,
        source=rank.node,
        target=target,
        state=MoveState.INTENDED,
        cause="",
        reason="",
        intended_unix_s=0.0,
        gpus=len(rank.gpus),
        memory_bytes=memory_for(rank, world.nodes.get(rank.node), world.nodes.get(target)),
    )


def plan(
    world: World,
    policy: Policy,
    rank: Rank,
    now: float,
    *,
    only: Collection[str] = (),
    may_leave: Callable[[Rank], bool],
    failed: Callable[[Rank, str], bool],
    rejected: Callable[[Plan], bool] = lambda plan: False,
    held: Collection[Move] = (),
) -> tuple[Plan | None, str]:
    """Which ranks leave which node so that the rank fits there, or why there is no such node.

    Nodes where room was made for it already come first, then those where the fewest ranks must leave.
    """
    source, room = world.nodes[rank.node], made_room(world, rank, now)
    spares = _Spares.of(world, policy, held)
    lower = lower_ranks(world, policy, rank)
    names = {*lower, *(move.source for move in room)} & (set(only) or world.nodes.keys())
    usable = usable_nodes(world, policy, rank, names, failed)
    sources = {move.source for move in room}

    def promising(node: Node) -> tuple[Any, ...]:
        """Room that was made already first, then where most is free, so that few must leave."""
        return node.name not in sources, -sum(gpu.free for gpu in node.gpus), preference(node, source)

    found: list[tuple[bool, int, tuple[Any, ...], Node, list[Rank]]] = []
    for node in sorted(usable, key=promising):
        gone = {move.rank_uid for move in room if move.source == node.name}
        chosen = fewest(world, rank, node, lower.get(node.name, []), gone, may_leave, held)
        if chosen is not None:
            found.append((not gone, len(chosen), preference(node, source), node, chosen))
        if len(found) == TRIED:
            break
    if not found:
        return None, "no rank of a lower priority can make room"
    reason = ""
    for _, _, _, node, chosen in sorted(found, key=lambda one: one[:3]):
        targets, why = _targets(world, policy, node, spares, chosen, failed, held)
        if len(targets) == len(chosen):
            before = tuple(move.rank_uid for move in room if move.source == node.name)
            made = Plan(node.name, tuple((one, targets[one.uid]) for one in chosen), before)
            if not rejected(made):
                return made, f"{node.name} has room without {names_of(chosen)}" if chosen else f"{node.name} has room"
            why = "an operator has rejected it"
        reason = reason or f"{names_of(chosen)} on {node.name} cannot make room: {why}"
    return None, reason


def usable_nodes(
    world: World, policy: Policy, rank: Rank, names: Iterable[str], failed: Callable[[Rank, str], bool]
) -> list[Node]:
    """Those of the named nodes that suit the rank, whatever is free there."""
    source = world.nodes[rank.node]
    return [
        node
        for name in names
        if (node := world.nodes[name]).state is NodeState.HEALTHY
        and name != source.name
        and not unfit(node, source, policy.spares, (name,))
        and not too_few_gpus(node, source, rank)
        and not failed(rank, name)
    ]


@dataclass(frozen=True)
class _Spares:
    """The spares that can be used. Of a cluster in need most have no free GPU: these need not be tried for most ranks."""

    usable: Mapping[str, Node]
    with_gpus: Mapping[str, Node]

    @classmethod
    def of(cls, world: World, policy: Policy, held: Collection[Move]) -> _Spares:
        known = free_spares(world, policy.spares, held)
        usable = {name: world.nodes[name] for name, (_, why) in known.items() if not why}
        return cls(usable, {name: node for name, node in usable.items() if known[name][0]})

    def for_rank(self, rank: Rank) -> Mapping[str, Node]:
        return self.with_gpus if rank.gpus else self.usable


def lower_ranks(world: World, policy: Policy, rank: Rank) -> dict[str, list[tuple[int, Rank]]]:
    """The ranks whose jobs have a lower priority, by node, with their priority."""
    priorities: dict[tuple[str, int], int] = {}  # a job is looked up once, and not once for each of its ranks
    mine = policy.job_for(rank).priority
    found: dict[str, list[tuple[int, Rank]]] = {}
    for one in world.ranks:
        job = (one.job, one.user_id)
        if job not in priorities:
            priorities[job] = policy.job_for(one).priority
        if priorities[job] < mine and not one.moving:
            found.setdefault(one.node, []).append((priorities[job], one))
    return found


def names_of(ranks: Sequence[Rank]) -> str:
    """ "rank 0 of low and rank 1 of low"."""
    return " and ".join(f"rank {rank.rank} of {rank.job}" for rank in ranks)


def fewest(
    world: World,
    rank: Rank,
    node: Node,
    candidates: Sequence[tuple[int, Rank]],
    gone: Collection[str],
    may_leave: Callable[[Rank], bool],
    held: Collection[Move],
) -> list[Rank] | None:
    """The ranks that must leave a node for the rank to fit there, lowest priority first. None: it would not fit anyway."""
    there = [one for one in world.ranks_on(node.name) if one.uid not in gone]
    ordered = sorted(candidates, key=lambda one: (one[0], -len(one[1].gpus), -one[1].size_bytes, one[1].uid))
    lower = [one for _, one in ordered if one.uid not in gone]
    leaving = [one for one in world.ranks_on(node.name) if one.uid in gone]
    free = room_on(world, node, held)

    def fits(chosen: Sequence[Rank]) -> bool:
        left = [*leaving, *chosen]
        used = {uuid for one in there if one not in chosen for uuid in one.gpus}
        freed: list[Gpu] = [
            gpu
            for gpu in node.gpus
            if not gpu.free and any(gpu.uuid in one.gpus for one in left) and gpu.uuid not in used
        ]
        space = Room([*free.gpus, *freed], free.memory_bytes + sum(one.memory_bytes for one in left))
        source = world.nodes[rank.node]
        return space.take(needs_of(source, rank), memory_for(rank, source, node))

    chosen: list[Rank] = []
    for one in lower:
        if fits(chosen):
            break
        if may_leave(one):
            chosen.append(one)
    if not fits(chosen):
        return None
    for one in list(chosen):  # what came before may not be needed any more
        fewer = [other for other in chosen if other is not one]
        if fits(fewer):
            chosen = fewer
    return chosen if chosen or gone else None


def _targets(
    world: World,
    policy: Policy,
    node: Node,
    spares: _Spares,
    ranks: Sequence[Rank],
    failed: Callable[[Rank, str], bool],
    held: Collection[Move],
) -> tuple[dict[str, str], str]:
    """Where each of the ranks of a node goes, all together, and why one goes nowhere."""
    targets: dict[str, str] = {}
    for rank in ranks:
        tried = spares.for_rank(rank)
        if not tried:
            return targets, f"no node can take it (no spare {'has a free GPU' if spares.usable else 'can be used'})"
        there = replace(world, nodes={**tried, node.name: node})
        placement = place(there, [rank], policy.spares, avoid=failed, held=held)
        if rank.uid not in placement.targets:
            return targets, placement.reason
        targets[rank.uid] = placement.targets[rank.uid]
        world = replace(world, moves=(*world.moves, taking(world, rank, targets[rank.uid])))
    return targets, ""
