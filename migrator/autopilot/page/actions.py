"""What an operator can do on the page. Who may do it is checked before (access.py).

Invariant: every action is recorded before it is carried out, with the operator's name and address. Repeating one, as a
browser may do, changes nothing a second time: it is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from migrator.autopilot import operate
from migrator.autopilot.model import NodeState, Order
from migrator.autopilot.page.feed import Feed
from snapshotd.api.errors import NotFound, Usage


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an action."""

    action: str
    node: str = ""  # of "move": where the rank is
    reason: Annotated[str, Meta(max_length=500)] = ""
    rank: str = ""  # of "move": its uid
    target: str = ""  # of "move"; empty: a spare is chosen
    proposal: int = 0  # of "approve" and "reject"


async def _drain(feed: Feed, asked: Asked, by: str) -> str:
    order = Order(0, "drain", asked.node, reason=asked.reason, by=by)
    given = await feed.store.give_order(order, NodeState.DRAINING)
    return f"{asked.node} is being drained (order {given.id})"


async def _return(feed: Feed, asked: Asked, by: str) -> str:
    order = Order(0, "return", asked.node, reason=asked.reason, by=by)
    given = await feed.store.give_order(order, NodeState.VALIDATING)
    return f"{asked.node} is being examined (order {given.id})"


async def _taint(feed: Feed, asked: Asked, by: str) -> str:
    before = await operate.taint(feed.store, asked.node, asked.reason or "an operator tainted it", by)
    return f"{asked.node} is tainted; it was {before}"


async def _use_again(feed: Feed, asked: Asked, by: str) -> str:
    used = await operate.use_again(feed.store, asked.node, by)
    return f"{asked.node} is healthy; it was {used.before}"


async def _move(feed: Feed, asked: Asked, by: str) -> str:
    world = await feed.world()
    given, name = await operate.move(feed.store, world, asked.node, asked.rank, asked.target, asked.reason, by)
    return f"{name} is being moved from {asked.node} to {asked.target or 'a spare'} (order {given.id})"


async def _answer(feed: Feed, asked: Asked, by: str) -> str:
    answered = await feed.store.answer_proposal(asked.proposal, asked.action == "approve", by, asked.reason)
    return f"proposal {answered.id} is {answered.state}: {answered.what}"


ANSWERS = ("approve", "reject")
ACTIONS: dict[str, Callable[[Feed, Asked, str], Awaitable[str]]] = {
    "drain": _drain,
    "return": _return,
    "taint": _taint,
    "undrain": _use_again,
    "untaint": _use_again,
    "move": _move,
    "approve": _answer,
    "reject": _answer,
}


def check(asked: Asked, nodes: Collection[str]) -> None:
    """Raises Usage or NotFound for what cannot be done in any state of the cluster."""
    if asked.action not in ACTIONS:
        raise Usage(f"the action must be one of {', '.join(ACTIONS)}")
    if asked.action in ANSWERS:
        return
    if asked.node not in nodes or (asked.target and asked.target not in nodes):
        raise NotFound("the cluster has no such node")


async def perform(feed: Feed, asked: Asked, name: str, address: str) -> str:
    """Records and carries out an action of an operator. Returns what was done. Raises WrongState if it cannot be done."""
    by = f"{name} (page)"
    about, more = asked.node, dict[str, Any]()
    if asked.action == "move":
        about, more = f"rank {asked.rank} on {asked.node}", {"rank_uid": asked.rank, "target": asked.target}
    elif asked.action in ANSWERS:
        about, more = f"proposal {asked.proposal}", {"proposal": asked.proposal}
    text = f"{name} at {address} asked to {asked.action} {about}"
    await feed.store.note("page", text, node=asked.node, by=by, action=asked.action, address=address, **more)
    return await ACTIONS[asked.action](feed, asked, by)
