"""Chooses the nodes that ranks are moved to. Pure.

Invariant: a rank is placed only on a node that is healthy, answers, is a spare, and has what the rank needs: free GPUs of the
same model with at least the same memory, as many GPUs as the source, the same driver, the same network domain, and enough
host memory. What another
intended move will take there counts as taken. Preflight looks again before anything is paused.

A node is a spare if it has the label `spare = "dedicated"` in cluster.toml. With `floating = true` in the policy, any node
with enough free GPUs is one too, after the dedicated ones. If no spare has room, ranks of a lower priority can make some on
any node: preempt.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from migrator.autopilot.model import Gpu, Move, MoveState, Node, NodeState, Rank
from migrator.autopilot.policy import Spares
from migrator.autopilot.world import World


@dataclass
class Room:
    """What is left on a node, while ranks are placed there one after the other."""

    gpus: list[Gpu]
    memory_bytes: int

    def take(self, needs: Sequence[Gpu], memory_bytes: int) -> bool:
        """Takes what a rank needs. If it does not fit, nothing is taken."""
        left = list(self.gpus)
        for need in sorted(needs, key=lambda gpu: -gpu.memory_bytes):
            fitting = [gpu for gpu in left if gpu.model == need.model and gpu.memory_bytes >= need.memory_bytes]
            if not fitting:
                return False
            left.remove(min(fitting, key=lambda gpu: gpu.memory_bytes))
        if memory_bytes > self.memory_bytes:
            return False
        self.gpus, self.memory_bytes = left, self.memory_bytes - memory_bytes
        return True


@dataclass(frozen=True)
class Placement:
    """Where each rank goes, by uid, and why those that are not among them go nowhere."""

    targets: Mapping[str, str]
    reason: str


def place(
    world: World,
    ranks: Sequence[Rank],
    rules: Spares,
    *,
    only: Collection[str] = (),
    avoid: Callable[[Rank, str], bool] = lambda rank, node: False,
    held: Collection[Move] = (),
) -> Placement:
    """Places ranks that leave the same node: all on one node if there is such a node, else each where it fits.

    `only` are the targets that an operator named, or where room was made; they need not be spares. `avoid` excludes a node
    for one rank. `held` are moves that will take room, and are not intended yet.
    """
    if not ranks:
        return Placement({}, "there is nothing to place")
    source = world.nodes[ranks[0].node]
    reasons = {node.name: unfit(node, source, rules, only) for node in world.nodes.values() if node.name != source.name}
    fit = [world.nodes[name] for name, reason in reasons.items() if not reason]
    fit.sort(key=lambda node: preference(node, source))
    for node in fit:  # the whole gang on one node
        room = room_on(world, node, held)
        barred = any(avoid(rank, node.name) or too_few_gpus(node, source, rank) for rank in ranks)
        if not barred and all(room.take(needs_of(source, rank), memory_for(rank, source, node)) for rank in ranks):
            return Placement({rank.uid: node.name for rank in ranks}, f"{node.name} has room for all")
    targets: dict[str, str] = {}
    if rules.gang != "require":
        rooms = {node.name: room_on(world, node, held) for node in fit}
        for rank in sorted(ranks, key=lambda rank: (-len(rank.gpus), -rank.size_bytes, rank.uid)):
            for node in fit:
                barred = avoid(rank, node.name) or too_few_gpus(node, source, rank)
                if not barred and rooms[node.name].take(needs_of(source, rank), memory_for(rank, source, node)):
                    targets[rank.uid] = node.name
                    break
    if len(targets) == len(ranks):
        return Placement(targets, f"{len(set(targets.values()))} nodes have room for them together")
    for node in fit:
        few = all(too_few_gpus(node, source, rank) for rank in ranks)
        failed = all(avoid(rank, node.name) for rank in ranks)
        fewer = f"has fewer GPUs than {source.name}"
        reasons[node.name] = fewer if few else "failed just now" if failed else "has no room"
    return Placement(targets, _why_none(reasons))


def free_spares(world: World, rules: Spares, held: Collection[Move] = ()) -> dict[str, tuple[int, str]]:
    """Every node that is or may be a spare: the number of free GPUs, and why it cannot be used now (empty: it can)."""
    found = {}
    for node in world.nodes.values():
        if node.dedicated or rules.floating:
            found[node.name] = (len(room_on(world, node, held).gpus), _unusable(node))
    return found


def _unusable(node: Node) -> str:
    if not node.seen or not node.reachable:
        return "does not answer"
    if node.state is not NodeState.HEALTHY:
        return f"is {node.state}"
    return _maintained(node)


def _maintained(node: Node) -> str:
    return f"has maintenance until {node.maintenance}" if node.maintenance else ""


def unfit(node: Node, source: Node, rules: Spares, only: Collection[str]) -> str:
    """Why no rank of the source may go there, whatever it needs. Empty: nothing speaks against it."""
    if only and node.name not in only:
        return "was not named"
    if not only and not node.dedicated and not rules.floating:
        return "is no spare"
    returned = bool(only) and node.reachable and node.state is NodeState.RETURNED
    if reason := _maintained(node) if returned else _unusable(node):
        return reason
    if source.labels.get("network", "") != node.labels.get("network", ""):
        return "is in another network domain"
    if rules.rack == "require" and source.labels.get("rack", "") != node.labels.get("rack", ""):
        return "is in another rack"
    if source.gpus and node.driver != source.driver:
        return f"has driver {node.driver or 'none'}, not {source.driver}"
    return ""


def too_few_gpus(node: Node, source: Node, rank: Rank) -> bool:
    """The driver needs a counterpart for each GPU of the source node, also for those that the rank does not use."""
    return bool(rank.gpus) and len(node.gpus) < len(source.gpus)


def preference(node: Node, source: Node) -> tuple[bool, bool, int, str]:
    """Dedicated spares first, then the same rack, then the node that is used up most: large rooms stay for gangs."""
    other_rack = source.labels.get("rack", "") != node.labels.get("rack", "")
    return not node.dedicated, other_rack, sum(gpu.free for gpu in node.gpus), node.name


def room_on(world: World, node: Node, held: Collection[Move] = ()) -> Room:
    """What is free on a node, without what intended moves will take, or have taken since it was asked."""
    free = [gpu for gpu in node.gpus if gpu.free]
    coming = [
        move for move in (*world.moves, *world.shifts, *held) if move.target == node.name and _is_coming(move, node)
    ]
    taken = sum(move.gpus for move in coming)
    return Room(free[taken:], node.memory_free_bytes - sum(move.memory_bytes for move in coming))


def _is_coming(move: Move, node: Node) -> bool:
    """Whether the rank is not among what the node has said to be in use."""
    if move.state is MoveState.MOVED:
        return move.ended_unix_s >= node.asked_unix_s
    return move.state is MoveState.INTENDED


def needs_of(source: Node, rank: Rank) -> list[Gpu]:
    """The GPUs of the rank. One that its node does not list fits nowhere: nothing is known about it."""
    known = {gpu.uuid: gpu for gpu in source.gpus}
    return [known.get(uuid, Gpu(uuid, "unknown", 1 << 62, free=False)) for uuid in rank.gpus]


def memory_for(rank: Rank, source: Node | None, target: Node | None) -> int:
    """The host memory that the target needs while the rank moves. Its device memory passes through rings there if both
    nodes hold it on the GPU and it is on one GPU (snapshotd/preflight/arriving.py). What the driver moves is not known here:
    preflight has the last word."""
    rings_bytes = [node.device_window_bytes if node is not None else 0 for node in (source, target)]
    if len(rank.gpus) != 1 or not all(rings_bytes):
        return rank.size_bytes
    return rank.memory_bytes + rings_bytes[0]  # the source decides how many stripes there are


def _why_none(reasons: Mapping[str, str]) -> str:
    """ "no node can take it (spare-1: is tainted; 12 nodes: is no spare)"."""
    if not reasons:
        return "no node can take it: there is no other node"
    counts = Counter(reasons.values())
    parts = []
    for reason, count in counts.most_common():
        names = [name for name, why in reasons.items() if why == reason]
        parts.append(f"{', '.join(names) if count <= 3 else f'{count} nodes'}: {reason}")
    return f"no node can take it ({'; '.join(parts)})"
