"""Asks every node once, for verbs that show or plan something without an autopilot."""

from __future__ import annotations

import asyncio
import contextlib

from migrator.autopilot.engine import Engine
from migrator.autopilot.policy import Policy
from migrator.autopilot.store import Store
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from snapshotd.api.errors import SnapshotError

LIMIT_S = 20.0


async def survey(cluster: Cluster, policy: Policy, store: Store) -> tuple[World, dict[str, SnapshotError]]:
    """What the autopilot would know now, and the nodes that do not answer. Moves nothing."""
    engine = Engine(cluster, policy, store, leads=store.history is None)  # else autopilots record what the nodes say
    watching = [asyncio.create_task(watcher.run()) for watcher in engine.watchers.values()]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await engine.first_answers()
        silent = {name: one.error for name, one in engine.watchers.items() if one.error is not None}
        return await engine.world(), silent
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
