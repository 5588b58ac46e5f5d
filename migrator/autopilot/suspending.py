"""Finds the job of a lower priority that is suspended so that a rank fits, and where a suspended job is resumed. Pure.

Invariant: a job is suspended only as a whole, only if its own nodes answer and nothing keeps one of its ranks where it is,
one at a time, and only one for the same rank. It is resumed only if there is room for all its ranks, and after all ranks of
a higher priority that wait for a place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from migrator.autopilot.model import Move, MoveState, Node, Rank
from migrator.autopilot.policy import Policy
from migrator.autopilot.preempt import STALE_S, TRIED, fewest, lower_ranks, usable_nodes
from migrator.autopilot.spares import needs_of, preference, room_on, unfit
from migrator.autopilot.suspension import BUSY, SuspendedRank, Suspension, SuspensionState
from migrator.autopilot.world import World

#: The pause after a failed attempt to resume a job doubles with each, up to so many times `breaker.back_off_s`.
MOST_BACK_OFF = 8


def in_progress(world: World) -> Suspension | None:
    """The job that is being suspended or resumed now."""
    return next((one for one in world.suspensions if one.state in BUSY), None)


def suspended_for(world: World, rank: Rank) -> Suspension | None:
    """The job that was suspended for this rank, and is not resumed yet."""
    return next((one for one in world.suspensions if one.open and one.makes_room_for == rank.uid), None)


def to_suspend(
    world: World,
    policy: Policy,
    rank: Rank,
    now: float,
    *,
    only: Collection[str] = (),
    may_leave: Callable[[Rank], bool],
    failed: Callable[[Rank, str], bool],
    held: Collection[Move] = (),
    order: int = 0,
) -> tuple[Suspension | None, str]:
    """The job whose suspension frees a place for the rank, not recorded yet; or why there is none.

    Jobs of the lowest priority come first, then those with the fewest ranks. Of nodes, those are tried where most is free.
    """
    if known := suspended_for(world, rank):
        return None, f"job {known.job} was suspended for it already, and {known.node} has no room"
    source = world.nodes[rank.node]
    lower = lower_ranks(world, policy, rank)
    nodes = usable_nodes(world, policy, rank, set(lower) & (set(only) or world.nodes.keys()), failed)
    found: list[tuple[tuple[Any, ...], Node, Sequence[Rank]]] = []
    kept: dict[str, str] = {}  # why a job is not suspended
    tried = 0
    for node in sorted(nodes, key=lambda one: (-sum(gpu.free for gpu in one.gpus), preference(one, source))):
        jobs: dict[str, list[tuple[int, Rank]]] = {}
        for priority, one in lower[node.name]:
            jobs.setdefault(one.job_key, []).append((priority, one))
        fitting = False
        for key, there in jobs.items():
            if fewest(world, rank, node, there, (), lambda one: True, held) is None:
                continue
            whole = world.ranks_of(key)
            if key not in kept:
                kept[key] = _keeps(world, policy, whole, now, may_leave)
            if not kept[key]:
                fitting = True
                found.append(((there[0][0], len(whole), preference(node, source), key), node, whole))
        tried += fitting
        if tried == TRIED:
            break
    if not found:
        reasons = sorted(f"{key.partition('/')[2]}: {why}" for key, why in kept.items())
        why = f" ({'; '.join(reasons[:3])})" if reasons else ""
        return None, f"no job of a lower priority can be suspended{why}"
    (priority, *_), node, whole = min(found, key=lambda one: one[0])
    mine = policy.job_for(rank).priority
    reason = f"suspended to make room for rank {rank.rank} of {rank.job} (priority {mine} > {priority})"
    ranks = tuple(
        SuspendedRank(
            one.uid, one.rank, one.node, one.home, tuple(needs_of(world.nodes[one.node], one)), one.size_bytes
        )
        for one in sorted(whole, key=lambda one: one.rank)
    )
    first = whole[0]
    return Suspension("", first.job, first.user_id, ranks, node.name, rank.uid, reason, now, order=order), reason


def _keeps(world: World, policy: Policy, whole: Sequence[Rank], now: float, may_leave: Callable[[Rank], bool]) -> str:
    """Why a job is not suspended. Empty: it can be."""
    silent = sorted({one.node for one in whole if not (world.nodes[one.node].seen and world.nodes[one.node].reachable)})
    if silent:
        return f"{silent[0]} does not answer"
    if sorted(one.rank for one in whole) != list(range(len(whole))) or len({one.uid for one in whole}) != len(whole):
        return "not all of its ranks are known"
    if any(one.moving for one in whole) or any(move.job_key == whole[0].job_key for move in world.running):
        return "one of its ranks is being moved"
    if not all(may_leave(one) for one in whole):
        return "the policy excludes it from moves, or one of its ranks must leave its node or has just been moved"
    before = [one for one in world.suspensions if one.job_key == whole[0].job_key]
    if any(one.open for one in before):
        return "it is suspended already"
    breaker = policy.breaker
    if any(now - one.ended_unix_s < breaker.rank_window_s for one in before if one.counts):
        return "it was suspended within the window of the policy"
    failed = [one.ended_unix_s for one in before if one.state is SuspensionState.NOT_SUSPENDED]
    if sum(now - ended <= breaker.window_s for ended in failed) >= breaker.undone:
        return f"{len(failed)} attempts have failed"
    if any(now - ended < breaker.back_off_s for ended in failed):
        return "the last attempt has just failed"
    return ""


def to_resume(
    world: World, policy: Policy, one: Suspension, now: float, *, first: str = "", held: Collection[Move] = ()
) -> tuple[Mapping[str, str], str]:
    """The nodes where all ranks of a suspended job are resumed, by uid, and in words why; or none, and why not.

    `first`: a rank of a higher priority that waits for a place. Each rank goes back to its node if there is room, else to the
    one where it was started, else to a spare."""
    if first:
        return {}, f"{first} waits for a place, and goes first"
    if one.failures:
        back_off_s = policy.breaker.back_off_s * min(2 ** (one.failures - 1), MOST_BACK_OFF)
        left_s = one.failed_unix_s + back_off_s - now
        if left_s > 0:
            return {}, f"it could not be resumed: {one.result}; retry in {left_s:.0f} s"
    rooms = {name: room_on(world, node, held) for name, node in world.nodes.items() if not _is_stale(world, node)}
    targets: dict[str, str] = {}
    for rank in sorted(one.ranks, key=lambda rank: (-len(rank.gpus), -rank.memory_bytes, rank.uid)):
        source = world.nodes.get(rank.node)
        if source is None or not (source.seen and source.reachable):
            return {}, f"{rank.node}, which has the image of rank {rank.rank}, does not answer"
        known = (rank.node, rank.home)
        fit = [
            node
            for name in rooms
            if not unfit(node := world.nodes[name], source, policy.spares, (name,) if name in known else ())
            and not (rank.gpus and len(node.gpus) < len(source.gpus))
        ]
        fit.sort(key=lambda node: (known.index(node.name) if node.name in known else 2, preference(node, source)))
        target = next((node.name for node in fit if rooms[node.name].take(rank.gpus, rank.memory_bytes)), "")
        if not target:
            return {}, f"no node has room for rank {rank.rank}"
        targets[rank.uid] = target
    names = ", ".join(dict.fromkeys(targets[rank.uid] for rank in one.ranks))
    return targets, f"{names} {'has' if len(set(targets.values())) == 1 else 'have'} room for all its ranks"


def _is_stale(world: World, node: Node) -> bool:
    """Whether a rank has arrived so recently that the node may not count it yet."""
    arrived = (move for move in (*world.moves, *world.shifts) if move.target == node.name)
    return any(move.state is MoveState.MOVED and node.asked_unix_s < move.ended_unix_s + STALE_S for move in arrived)
