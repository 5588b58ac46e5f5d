"""`migrator rebalance`: moves ranks back to the nodes where they were started, so that spares are free again."""

from __future__ import annotations

import argparse
import asyncio
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
    parser = verbs.add(
        "rebalance",
        act,
        "move ranks back to the nodes where they were started",
        more="Ranks whose node is not usable, or has no room, stay where they are. Exits with 10 if one cannot be moved.",
        examples="  migrator rebalance --dry-run\n  migrator rebalance",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="reason for the record")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
    state.add_policy(parser)
    state.add_state(parser)


def act(options: argparse.Namespace) -> int:
    from migrator.autopilot.model import Order

    policy = state.the_policy(options)
    cluster = arguments.the_cluster(options)
    order = Order(0, "rebalance", "", reason=options.reason, by=state.operator())
    folder, as_json = state.folder(options, cluster), arguments.wants_json(options)
    if options.dry_run:
        return asyncio.run(orders.plan(cluster, policy, folder, order, as_json=as_json))
    return asyncio.run(_carry_out(cluster, policy, folder, order, as_json=as_json))


async def _carry_out(cluster: Cluster, policy: Policy, folder: Path, order: Order, *, as_json: bool) -> int:
    async with state.opened(folder, changing=True) as store:
        # One that was interrupted, and that no autopilot carries out, is taken over.
        before = [one for one in (await store.load(store.now())).orders if one.kind == order.kind]
        given = before[0] if before else await store.give_order(order, None)
        await orders.follow(cluster, policy, store, given.id)
        ended, moves = await store.order(given.id), await store.moves_of_order(given.id)
    stays = " stays: " in ended.summary
    if as_json:
        facts = {"order": given.id, "kind": order.kind, "complete": not stays, "summary": ended.summary}
        output.json_object({**facts, "moves": [orders.move_json(move) for move in moves]})
    else:
        if moves:
            orders.table(moves)
        print(formatting.plain(ended.summary))
    return Refused.exit_code if stays else 0
