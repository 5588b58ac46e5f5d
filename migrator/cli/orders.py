"""What the verbs that give orders share: they follow an order to its end, or show what it would do."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from migrator import formatting
from migrator.cli import output, state
from snapshotd.api.errors import Unreachable

if TYPE_CHECKING:
    from migrator.autopilot.facts import AboutRank
    from migrator.autopilot.model import Move, Order
    from migrator.autopilot.policy import Policy
    from migrator.autopilot.store import Store
    from migrator.cluster import Cluster

HEADS = ("JOB", "RANK", "FROM", "TO", "OUTCOME", "PAUSE", "REASON")
FOLLOW_S = 0.3


async def follow(cluster: Cluster, policy: Policy, store: Store, order: int) -> None:
    """Waits until the order has ended. Whenever no autopilot runs, carries it out."""
    from migrator.autopilot import actor
    from migrator.autopilot.engine import Engine

    if store.history is not None:
        await _wait_for_leader(store, order)
        return
    while not (await store.order(order)).ended_unix_s:
        with actor.acting(store.folder) as first:
            if first:
                await Engine(cluster, policy, store, only_order=order).run(asyncio.Event())
                continue
        await asyncio.sleep(FOLLOW_S)


async def _wait_for_leader(store: Store, order: int) -> None:
    """With several autopilots the leader carries orders out, on whatever machine it is."""
    from migrator.autopilot import leader

    assert store.history is not None
    etcd, key, told = store.history.etcd, store.history.leader_key, ""
    while not (await store.order(order)).ended_unix_s:
        await asyncio.sleep(FOLLOW_S)
        try:
            await store.follow()
            leads = await asyncio.to_thread(leader.current, etcd, key)
            wait = "" if leads else "no autopilot leads now: the next leader carries the order out"
        except Unreachable as error:
            wait = f"the order is recorded, and waits: {error.message}"
        if wait != told and wait:
            print(formatting.plain(f"migrator: {wait}"), file=sys.stderr, flush=True)
        told = wait


def move_json(move: Move) -> dict[str, Any]:
    return {**msgspec.to_builtins(move), "job": move.job_key.partition("/")[2]}


def table(moves: list[Move]) -> None:
    output.table(HEADS, [_row(move) for move in moves], right=("RANK", "PAUSE"))


def _row(move: Move) -> tuple[str, ...]:
    pause = formatting.seconds(move.pause_s) if move.pause_s else "-"
    job = move.job_key.partition("/")[2]
    return (job, str(move.rank), move.source, move.target, move.state.value, pause, move.result)


# ---------------------------------------------------------------------- dry run


async def plan(cluster: Cluster, policy: Policy, folder: Path, order: Order, *, as_json: bool) -> int:
    """Shows where each rank would go, as if they could all move at once."""
    from migrator.autopilot.facts import about_ranks
    from migrator.autopilot.model import NodeState
    from migrator.autopilot.policy import Job
    from migrator.autopilot.survey import survey

    jobs = tuple(msgspec.structs.replace(job, independent=True) for job in (*policy.jobs, Job("*")))
    policy = msgspec.structs.replace(policy, jobs=jobs)
    async with state.opened(folder, changing=False) as store:
        world, silent = await survey(cluster, policy, store)
        now = store.now()
    order = replace(order, id=-1, since_unix_s=now)
    world = replace(world, orders=(order,))
    if order.node:
        after = NodeState.RETURNED if order.kind == "return" else NodeState.DRAINING
        world = replace(world, nodes={**world.nodes, order.node: replace(world.nodes[order.node], state=after)})
    decided = [about for about in about_ranks(world, policy, now) if about.why.order == order.id]
    if as_json:
        output.json_object(
            {
                "kind": order.kind,
                "node": order.node,
                "dry_run": True,
                "ranks": [_plan_json(about) for about in decided],
                "unreachable": output.silent_objects(silent),
            }
        )
        return 0
    output.warn_silent(silent, len(cluster.nodes), as_json=False)
    rows = [
        (about.rank.job, str(about.rank.rank), about.rank.node, about.target or "-", about.decision.value, about.reason)
        for about in decided
    ]
    if rows:
        output.table(("JOB", "RANK", "FROM", "TO", "DECISION", "REASON"), rows, right=("RANK",))
    else:
        print("no rank would be moved")
    return 0


def _plan_json(about: AboutRank) -> dict[str, Any]:
    return {
        "uid": about.rank.uid,
        "job": about.rank.job,
        "user_id": about.rank.user_id,
        "rank": about.rank.rank,
        "source": about.rank.node,
        "target": about.target,
        "decision": about.decision.value,
        "reason": about.reason,
    }
