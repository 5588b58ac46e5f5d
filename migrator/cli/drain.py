"""`migrator drain`, `evacuate`, `return` and `undrain`: orders about one node.

An order is recorded first. The autopilot carries it out if one runs, else this command does; if the autopilot ends meanwhile,
this command takes over. With several autopilots only their leader carries orders out, and this command waits for one. Ctrl-C
leaves the order to the autopilot, or open if there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from migrator import formatting
from migrator.cli import arguments, orders, output, state
from snapshotd.api.errors import Refused

if TYPE_CHECKING:
    from migrator.autopilot.model import Order
    from migrator.autopilot.policy import Policy
    from migrator.cluster import Cluster


def add(verbs: arguments.Verbs) -> None:
    drain = verbs.add(
        "drain",
        functools.partial(_order, "drain"),
        "move all ranks of a node to spares, and use the node no more",
        more="One rank of a job is moved at a time. Jobs that the policy excludes stay. Exits with 10 if a rank stays.",
        examples='  migrator drain node-3 --reason "replace a fan"\n  migrator drain node-3 --to spare-1 --dry-run',
    )
    evacuate = verbs.add(
        "evacuate",
        functools.partial(_order, "evacuate"),
        "move all ranks of a node away now, also those of jobs that the policy excludes",
        more="Ranks of different jobs leave at the same time, and of one job one after the other, unless the policy says "
        "that they are independent. Exits with 10 if a rank stays.",
        examples="  migrator evacuate node-3",
    )
    returned = verbs.add(
        "return",
        functools.partial(_order, "return"),
        "examine a repaired node, use it again, and move its ranks back",
        more="Alarms of the node are cleared, then it is validated (docs/autopilot.md). Ranks that were started there and "
        "are elsewhere move back. If the validation fails, nothing is moved, and the command exits with 10.",
        examples="  migrator return node-3",
    )
    for parser in (drain, evacuate, returned):
        parser.add_argument("node", type=arguments.node, metavar="NODE")
        parser.add_argument("--reason", default="", metavar="TEXT", help="reason for the record")
        parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
        state.add_policy(parser)
        state.add_state(parser)
    for parser in (drain, evacuate):
        parser.add_argument(
            "--to", type=_nodes, default=(), metavar="A,B,…", help="nodes to move the ranks to (default: spares)"
        )
    returned.set_defaults(to=())
    undrain = verbs.add(
        "undrain",
        _undrain,
        "use a node again without examining it, and end an order about it",
        examples="  migrator undrain node-3",
    )
    undrain.add_argument("node", type=arguments.node, metavar="NODE")
    undrain.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
    state.add_state(undrain)


def _nodes(text: str) -> tuple[str, ...]:
    return tuple(arguments.node(name.strip()) for name in text.split(","))


def _order(kind: str, options: argparse.Namespace) -> int:
    from migrator.autopilot.model import Order
    from migrator.find_rank import find_node

    policy = state.the_policy(options)
    cluster = arguments.the_cluster(options)
    for name in (options.node, *options.to):
        find_node(cluster, name)
    order = Order(0, kind, options.node, options.to, options.reason, state.operator())
    folder, as_json = state.folder(options, cluster), arguments.wants_json(options)
    if options.dry_run:
        return asyncio.run(orders.plan(cluster, policy, folder, order, as_json=as_json))
    return asyncio.run(_carry_out(cluster, policy, folder, order, as_json=as_json))


# ---------------------------------------------------------------------- for real


async def _carry_out(cluster: Cluster, policy: Policy, folder: Path, order: Order, *, as_json: bool) -> int:
    from migrator.autopilot.model import MoveState, NodeState

    async with state.opened(folder, changing=True) as store:
        known = (await store.load(store.now())).nodes
        first = NodeState.VALIDATING if order.kind == "return" else NodeState.DRAINING
        given = await store.give_order(order, first)
        await orders.follow(cluster, policy, store, given.id)
        ended, moves = await store.order(given.id), await store.moves_of_order(given.id)
        after = (await store.load(store.now())).nodes[order.node]
    done = after.state in (NodeState.DRAINED, NodeState.RETURNED, NodeState.HEALTHY)
    done = done and not any(move.state is MoveState.INTENDED for move in moves)
    if as_json:
        before = known[order.node].state.value if order.node in known else NodeState.HEALTHY.value
        output.json_object(
            {
                "order": given.id,
                "kind": order.kind,
                "node": order.node,
                "before": before,
                "state": after.state.value,
                "complete": done,
                "summary": ended.summary,
                "moves": [orders.move_json(move) for move in moves],
            }
        )
    else:
        if moves:
            orders.table(moves)
        print(formatting.plain(f"{order.node} is {after.state}: {ended.summary}"))
    return 0 if done else Refused.exit_code


# ---------------------------------------------------------------------- undrain


def _undrain(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    return asyncio.run(
        use_again(cluster, state.folder(options, cluster), options.node, options.dry_run, arguments.wants_json(options))
    )


async def use_again(cluster: Cluster, folder: Path, node: str, dry_run: bool, as_json: bool) -> int:
    """Makes a node healthy by an operator's word, and ends an order about it. `untaint` does the same."""
    from migrator.autopilot import operate
    from migrator.find_rank import find_node

    find_node(cluster, node)
    async with state.opened(folder, changing=not dry_run) as store:
        used = await operate.use_again(store, node, state.operator(), dry_run=dry_run)
    before, alarms = used.before, used.alarms
    if as_json:
        facts = {
            "node": node,
            "before": before.value,
            "state": "healthy",
            "orders_ended": used.orders,
            "alarms": alarms,
        }
        output.json_object({**facts, "dry_run": dry_run})
    else:
        print(f"{node} {'would be' if dry_run else 'is'} healthy; it was {before}")
        if alarms:
            print(f"  it still has alarms, and a rule may act on them again: {formatting.plain(', '.join(alarms))}")
    return 0
