"""What an operator can tell the autopilot, by a verb or on the page. Everything is recorded, with who asked.

`Store.give_order` records orders that the engine carries out. The changes here take effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from migrator.autopilot.model import OUT, NodeState, Order
from migrator.autopilot.store import Store
from migrator.autopilot.world import World
from snapshotd.api.errors import WrongState


@dataclass(frozen=True)
class UsedAgain:
    before: NodeState
    orders: list[int]  # that were ended
    alarms: list[str]  # that the node still has: the names of their checks


async def taint(store: Store, node: str, reason: str, by: str, *, dry_run: bool = False) -> NodeState:
    """Moves no rank to a node any more. Returns the state before. Raises WrongState if it is out of use already."""

    def check(before: NodeState) -> None:
        if before in OUT - {NodeState.TAINTED}:
            raise WrongState(f"{node} is {before}: no rank is moved there anyway", remedy=f"`migrator undrain {node}`")

    if not dry_run:
        return await store.set_node(node, NodeState.TAINTED, reason, by, check)
    known = (await store.load(store.now())).nodes.get(node)
    before = known.state if known is not None else NodeState.HEALTHY
    check(before)
    return before


async def move(
    store: Store, world: World, node: str, rank_uid: str, target: str, reason: str, by: str
) -> tuple[Order, str]:
    """Orders to move one rank away from a node, to a target or (empty) to a spare. Returns the order, and the rank in words.

    Repeating it moves nothing twice: the rank must be on that node. Raises WrongState if it is not, or is being moved, or
    the target cannot be used.
    """
    rank = next((one for one in world.ranks_on(node) if one.uid == rank_uid), None)
    if rank is None:
        raise WrongState(f"the rank is not on {node} (any more)", remedy="look where it is now")
    name = f"rank {rank.rank} of {rank.job}"
    if rank.moving or any((one.rank_uid, one.source) == (rank_uid, node) for one in world.running):
        raise WrongState(f"{name} is being moved already", remedy="wait for the end of its move")
    if target:
        there = world.nodes[target]
        if target == node or there.state is not NodeState.HEALTHY or not (there.seen and there.reachable):
            word = "where it is" if target == node else there.state if there.reachable else "silent"
            raise WrongState(f"{name} cannot be moved to {target}: it is {word}", remedy="choose another node")
    order = Order(0, "move", node, (target,) if target else (), reason, by, rank_uid=rank_uid, rank_name=name)
    return await store.give_order(order, None), name


async def use_again(store: Store, node: str, by: str, *, dry_run: bool = False) -> UsedAgain:
    """Makes a node healthy by an operator's word, and ends an order about it."""
    if not dry_run:
        before, orders, alarms = await store.use_again(node, by)
        return UsedAgain(before, orders, [alarm.check for alarm in alarms])
    stored = await store.load(store.now())
    before = stored.nodes[node].state if node in stored.nodes else NodeState.HEALTHY
    orders = [order.id for order in stored.orders if order.node == node]
    return UsedAgain(before, orders, [alarm.check for alarm in stored.alarms if alarm.node == node])
