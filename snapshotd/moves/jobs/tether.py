"""Ends ranks of protected jobs that are cut off from their coordinator, because the job may have been rolled back meanwhile.

Invariant: a rank of a job that has a snapshot runs only as long as its coordinator has answered within the last CUT_OFF_S, or
its machine has at least refused the connection. A coordinator that cannot reach this node waits longer than that before it
lets another copy of the rank run. A daemon that is down cannot do this: the coordinator waits for it, or for an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import job_rules
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.rollback import answers
from snapshotd.moves.node import Node
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.repeated import Repeated

log = logging.getLogger(__name__)

EVERY_S = 2.0
ASK_S = 3.0
_Of = tuple[str, str, str]  # a coordinator, its endpoint, and the incarnation


class Tether:
    """One instance per daemon."""

    def __init__(self, node: Node, endings: Endings) -> None:
        self.node, self.endings = node, endings
        self._heard_s: dict[_Of, float] = {}  # CLOCK_BOOTTIME of the last question that was answered
        self.repeated = Repeated("coordinators of jobs", self.look, EVERY_S)

    async def look(self) -> None:
        """Asks the coordinators of all ranks here once."""
        mine: dict[_Of, list[RankEntry]] = {}
        for entry in self.node.ranks.all():
            if entry.tethered and not entry.away_node and entry.coordinator_node != self.node.config.node:
                of = (entry.coordinator_node, entry.coordinator_endpoint, entry.incarnation)
                mine.setdefault(of, []).append(entry)
        self._heard_s = {of: since for of, since in self._heard_s.items() if of in mine}
        await asyncio.gather(*(self._ask(of, entries) for of, entries in mine.items()))

    async def _ask(self, of: _Of, entries: list[RankEntry]) -> None:
        node, endpoint, incarnation = of
        asked_s = host.boottime_s()
        heard_s = self._heard_s.setdefault(of, asked_s)
        request = pb.MayRunRequest(incarnation=incarnation, rank_uids=[entry.uid for entry in entries])
        try:
            async with self.node.client(node, endpoint) as client:
                reply = await client.job.MayRun(request, timeout_s=ASK_S)
        except SnapshotError as error:
            if await answers(endpoint):
                self._heard_s[of] = asked_s
            elif job_rules.is_cut_off(silent_s := host.boottime_s() - heard_s):
                await self._end(entries, f"{node} has been silent for {silent_s:.0f} s: {error.headline}")
            return
        self._heard_s[of] = asked_s
        if reply.ended_by:
            await self._end(entries, f"its job was rolled back ({reply.ended_by})")

    async def _end(self, entries: list[RankEntry], why: str) -> None:
        for entry in entries:
            log.error("rank %s is ended: %s", entry.uid, why)
            await in_thread(self.node.ranks.end, entry.uid, entry.incarnation, entry.coordinator_node)
        for entry in entries:
            with contextlib.suppress(SnapshotError):
                await self.endings.end_one(entry, why)
