"""What an operator can tell the autopilot about a node, by a verb or on the page. Everything is recorded, with who asked.

`Store.give_order` records orders that the engine carries out. The changes here take effect at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from migrator.autopilot.model import OUT, NodeState
from migrator.autopilot.store import Store
from snapshotd.api.errors import WrongState


@dataclass(frozen=True)
class UsedAgain:
    before: NodeState
    orders: list[int]  # that were ended
    alarms: list[str]  # that the node still has: the names of their checks


async def taint(store: Store, node: str, reason: str, by: str, *, dry_run: bool = False) -> NodeState:
    """Moves no rank to a node any more. Returns the state before. Raises WrongState if it is out of use already."""
    known = (await store.load(store.now())).nodes.get(node)
    before = known.state if known is not None else NodeState.HEALTHY
    if before in OUT - {NodeState.TAINTED}:
        raise WrongState(f"{node} is {before}: no rank is moved there anyway", remedy=f"`migrator undrain {node}`")
    if not dry_run:
        await store.set_node(node, NodeState.TAINTED, reason, by)
    return before


async def use_again(store: Store, node: str, by: str, *, dry_run: bool = False) -> UsedAgain:
    """Makes a node healthy by an operator's word, and ends an order about it."""
    stored = await store.load(store.now())
    before = stored.nodes[node].state if node in stored.nodes else NodeState.HEALTHY
    orders = [order.id for order in stored.orders if order.node == node]
    if not dry_run:
        for order in orders:
            await store.end_order(order, f"ended by {by}")
        if before is not NodeState.HEALTHY:
            await store.set_node(node, NodeState.HEALTHY, "an operator ended it", by)
    return UsedAgain(before, orders, [alarm.check for alarm in stored.alarms if alarm.node == node])
