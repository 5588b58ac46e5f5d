"""Asks the nodes every few seconds how far their ranks have come, and keeps the alarms about jobs up to date.

Invariant: only nodes that have ranks are asked, and an answer that is missing, late or damaged means that nothing is
known, never that a rank stands still.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from migrator.autopilot import convert
from migrator.autopilot.model import Alarm
from migrator.autopilot.policy import Policy
from migrator.autopilot.progress import HORIZON_S, Jobs
from migrator.autopilot.store import Store
from migrator.autopilot.watcher import Watcher
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError

log = logging.getLogger(__name__)

POLL_S = 5.0
CALL_S = 10.0
#: Of a daemon that has no such call, or gives an answer that makes no sense.
RETRY_S = 60.0
#: How often the numbers of alarms are written that neither begin nor end.
WRITE_S = 10.0


class ProgressFeed:
    def __init__(self, cluster: Cluster, policy: Policy, store: Store, watchers: Mapping[str, Watcher]) -> None:
        self.cluster, self.store, self.watchers = cluster, store, watchers
        self.jobs = Jobs(policy.progress)
        self._written_s = float("-inf")
        self._raised: set[tuple[str, str, str]] | None = None  # None: nothing was written yet

    def start(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._follow(node), name=f"progress of {node}") for node in self.watchers]

    async def resume(self) -> None:
        """Takes up what was known before a restart."""
        now = self.store.now()
        self.jobs.resume((await self.store.load(now)).alarms, now)

    async def update(self, world: World) -> bool:
        """Raises, updates and clears alarms. Returns whether the store has changed."""
        self.jobs.forget(world.ranks)
        alarms = self.jobs.alarms(self.store.now())
        raised = {_key(alarm) for alarm in alarms}
        if raised == self._raised and time.monotonic() < self._written_s + WRITE_S:
            return False
        self._raised, self._written_s = raised, time.monotonic()
        return await self.store.set_job_alarms(alarms)

    async def _follow(self, node: str) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async with self.cluster.client(node) as client:
                    after = 0
                    while True:
                        await asyncio.sleep(POLL_S)
                        after = await self._ask(client, node, after)
            except UnknownMethod:
                await asyncio.sleep(RETRY_S)
            except SnapshotError as error:
                log.debug("the progress of the ranks on %s is not known: %s", node, error.message)
                await asyncio.sleep(POLL_S if self.watchers[node].error is not None else RETRY_S)

    async def _ask(self, client: DaemonClient, node: str, after: int) -> int:
        """Returns the number of the last reading that is known."""
        seen = self.watchers[node].sighting
        if seen is None or not seen.ranks or self.watchers[node].error is not None:
            return after
        asked = self.store.now()
        reply = await client.node.GetProgress(pb.GetProgressRequest(after=after), timeout_s=CALL_S)
        answered = self.store.now()
        ahead_s, unsure_s = reply.now_unix_s - (asked + answered) / 2, (answered - asked) / 2
        report = convert.progress(node, reply, ahead_s, unsure_s)
        seen = self.watchers[node].sighting or seen
        self.jobs.take(report, seen.ranks, answered - HORIZON_S)
        return max(after, report.newest)


def _key(alarm: Alarm) -> tuple[str, str, str]:
    return alarm.node, alarm.check, alarm.subject
