"""`migrator taint` and `untaint`: tells the autopilot, and every other verb, to move no rank to a node."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from migrator.cli import arguments, output, state
from migrator.cli.drain import use_again

if TYPE_CHECKING:
    from pathlib import Path

    from migrator.cluster import Cluster


def add(verbs: arguments.Verbs) -> None:
    taint = verbs.add(
        "taint",
        _taint,
        "move no rank to a node any more",
        more="Its ranks stay. `migrator drain` moves them away.",
        examples='  migrator taint node-3 --reason "strange noises"',
    )
    taint.add_argument("--reason", default="an operator tainted it", metavar="TEXT", help="reason for the record")
    untaint = verbs.add("untaint", _untaint, "end a taint", examples="  migrator untaint node-3")
    for parser in (taint, untaint):
        parser.add_argument("node", type=arguments.node, metavar="NODE")
        parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
        state.add_state(parser)


def _taint(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    folder, as_json = state.folder(options, cluster), arguments.wants_json(options)
    return asyncio.run(_set(cluster, folder, options.node, options.reason, options.dry_run, as_json=as_json))


async def _set(cluster: Cluster, folder: Path, node: str, reason: str, dry_run: bool, *, as_json: bool) -> int:
    from migrator.autopilot import operate
    from migrator.find_rank import find_node

    find_node(cluster, node)
    async with state.opened(folder, changing=not dry_run) as store:
        before = await operate.taint(store, node, reason, state.operator(), dry_run=dry_run)
    if as_json:
        output.json_object({"node": node, "before": before.value, "state": "tainted", "dry_run": dry_run})
    else:
        print(f"{node} {'would be' if dry_run else 'is'} tainted; it was {before}")
    return 0


def _untaint(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    folder = state.folder(options, cluster)
    return asyncio.run(use_again(cluster, folder, options.node, options.dry_run, arguments.wants_json(options)))
