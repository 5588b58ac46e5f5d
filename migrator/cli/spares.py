"""`migrator spares`: lists the nodes that ranks can be moved to."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from migrator.cli import arguments, output, state

if TYPE_CHECKING:
    from migrator.autopilot.policy import Policy
    from migrator.autopilot.world import World
    from migrator.cluster import Cluster
    from snapshotd.api.errors import SnapshotError


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "spares",
        act,
        "list the nodes that ranks can be moved to",
        more='A node with the label spare = "dedicated" in cluster.toml is a spare; with floating = true in the policy, '
        "every node with free GPUs is one.",
        examples="  migrator spares\n  migrator spares --policy /etc/migrator/policy.toml --json",
    )
    state.add_policy(parser)
    state.add_state(parser)


def act(options: argparse.Namespace) -> int:
    from migrator.autopilot.spares import free_spares

    policy = state.the_policy(options)
    cluster = arguments.the_cluster(options)
    world, silent = asyncio.run(_look(cluster, policy, options))
    found = free_spares(world, policy.spares)
    as_json = arguments.wants_json(options)
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    if as_json:
        objects = [
            {
                "node": name,
                "kind": "dedicated" if world.nodes[name].dedicated else "floating",
                "state": world.nodes[name].state.value,
                "usable": not why,
                "reason": why,
                "gpus_free": gpus,
                "memory_free_bytes": world.nodes[name].memory_free_bytes,
                "labels": dict(world.nodes[name].labels),
                "ranks": len(world.ranks_on(name)),
            }
            for name, (gpus, why) in found.items()
        ]
        output.json_object({"spares": objects})
    elif found:
        rows = [_row(world, name, gpus, why) for name, (gpus, why) in found.items()]
        output.table(
            ("NODE", "KIND", "STATE", "GPUS FREE", "RANKS", "RACK", "USABLE"), rows, right=("GPUS FREE", "RANKS")
        )
    else:
        print('no node is a spare: give one the label spare = "dedicated" in cluster.toml, [nodes.NAME.labels]')
    return 0


async def _look(
    cluster: Cluster, policy: Policy, options: argparse.Namespace
) -> tuple[World, dict[str, SnapshotError]]:
    from migrator.autopilot.survey import survey

    async with state.opened(state.folder(options, cluster), changing=False) as store:
        return await survey(cluster, policy, store)


def _row(world: World, name: str, gpus: int, why: str) -> tuple[str, ...]:
    node = world.nodes[name]
    kind = "dedicated" if node.dedicated else "floating"
    ranks = str(len(world.ranks_on(name)))
    return (
        name,
        kind,
        node.state.value,
        str(gpus),
        ranks,
        node.labels.get("rack", "-"),
        f"no: {why}" if why else "yes",
    )
