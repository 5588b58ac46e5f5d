"""Has copies of snapshots sent without their limit, if they keep a rank that must leave its node.

As `migrator move` does (migrator/hurry.py), but repeatedly for as long as the rank waits: the copy of a snapshot that is just
being taken begins later, and one that has failed may be sent a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from migrator.autopilot.facts import AboutRank, lacks_place
from migrator.autopilot.policy import Policy
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from migrator.hurry import hurry

AGAIN_S = 2.0


def kept_by_others(world: World, policy: Policy, decided: Iterable[AboutRank], now: float) -> set[tuple[str, str]]:
    """The ranks that would leave now, were they not moved or copied by others: their nodes, and what they are in. Pure."""
    mine = {move.rank_uid for move in world.running}
    return {
        (about.rank.node, about.rank.moving)
        for about in decided
        if about.rank.moving
        and about.rank.uid not in mine
        and lacks_place(world, policy, replace(about, rank=replace(about.rank, moving="")), now)
    }


class Hurrying:
    """One for each engine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def only(self, waited_for: set[tuple[str, str]]) -> None:
        """Asks for these from now on, and for no others."""
        for ended in self.tasks.keys() - waited_for:
            self.tasks.pop(ended).cancel()
        for node, move in waited_for - self.tasks.keys():
            self.tasks[node, move] = asyncio.create_task(self._ask(node, move))

    async def _ask(self, node: str, move: str) -> None:
        while True:
            await hurry(self.cluster, [(node, move)])
            await asyncio.sleep(AGAIN_S)
