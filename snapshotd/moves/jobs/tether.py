"""Ends ranks of protected jobs that are cut off from their coordinator, because the job may have been rolled back meanwhile.

Invariant: a rank of a job that has a snapshot runs only as long as its coordinator has answered within the last CUT_OFF_S, or
its machine has at least refused the connection. A coordinator that cannot reach this node waits longer than that before it
lets another copy of the rank run. A daemon that is down cannot do this: the coordinator waits for it, or for an operator.
"""

from __future__ import annotations

import asyncio
import json
import logging

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import job_rules
from snapshotd.moves.jobs.ending import Endings
from snapshotd.moves.jobs.machines import answers
from snapshotd.moves.node import Node
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.repeated import Repeated

log = logging.getLogger(__name__)

EVERY_S = 1.0
ASK_S = 2.0
FILE = "coordinators.json"
_Of = tuple[str, str, str]  # a coordinator, its endpoint, and the incarnation


async def bind(node: Node, entry: RankEntry, coordinator: str, endpoint: str) -> None:
    """From now on another coordinator may end this rank."""
    entry.coordinator_node, entry.coordinator_endpoint = coordinator, endpoint
    await in_thread(node.ranks.update, entry)
    if entry.link is not None:
        entry.link.key_changed.set()  # a guest's relay tells the home node


class Tether:
    """One instance per daemon."""

    def __init__(self, node: Node, endings: Endings) -> None:
        self.node, self.endings = node, endings
        self._file = node.ranks.folder.parent / FILE
        self._heard_s = self._recalled()  # CLOCK_BOOTTIME of the last question that was answered
        self.repeated = Repeated("coordinators of jobs", self.look, EVERY_S)

    async def look(self) -> None:
        """Asks the coordinators of all ranks here once, and goes on with ranks that could not be ended before."""
        over = await in_thread(self.endings.ended_ones)
        await asyncio.gather(*(self.endings.try_to_end(entry, "it was to be ended before") for entry in over))
        mine: dict[_Of, list[RankEntry]] = {}
        for entry in self.node.ranks.all():
            if not entry.tethered or entry.away_node or entry.coordinator_node == self.node.config.node:
                continue
            if entry not in over:
                of = (entry.coordinator_node, entry.coordinator_endpoint, entry.incarnation)
                mine.setdefault(of, []).append(entry)
        before, self._heard_s = self._heard_s, {of: since for of, since in self._heard_s.items() if of in mine}
        found = await asyncio.gather(*(self._ask(of, entries) for of, entries in mine.items()), return_exceptions=True)
        if before or self._heard_s:
            await in_thread(self._remember)
        for error in found:
            if isinstance(error, BaseException):
                raise error

    async def _ask(self, of: _Of, entries: list[RankEntry]) -> None:
        node, endpoint, incarnation = of
        asked_s = host.boottime_s()
        heard_s = self._heard_s.setdefault(of, asked_s)
        request = pb.MayRunRequest(incarnation=incarnation, rank_uids=[entry.uid for entry in entries])
        try:
            async with self.node.client(node, endpoint) as client:
                reply = await client.job.MayRun(request, timeout_s=ASK_S)
        except (SnapshotError, OSError) as error:
            if await answers(endpoint, ASK_S):
                self._heard_s[of] = asked_s
            elif job_rules.is_cut_off(silent_s := host.boottime_s() - heard_s):
                await self.endings.cut_off(entries, f"{node} has been silent for {silent_s:.0f} s: {error}")
            return
        self._heard_s[of] = asked_s
        if reply.ended_by:
            await self.endings.cut_off(entries, f"its job was rolled back ({reply.ended_by})")
        elif reply.successor:
            for entry in entries:
                await bind(self.node, entry, reply.successor, reply.successor_endpoint)

    def _remember(self) -> None:
        """So that a restarted daemon does not begin to wait anew. No process survives the machine, so nothing is synced."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps([host.boot_id(), [[*of, since] for of, since in self._heard_s.items()]]))
        fresh.rename(self._file)

    def _recalled(self) -> dict[_Of, float]:
        try:
            boot_id, listed = json.loads(self._file.read_text())
            known = {(str(node), str(endpoint), str(of)): float(since) for node, endpoint, of, since in listed}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            log.warning("when coordinators were heard last is not known: %s", error)
            return {}
        return known if boot_id == host.boot_id() else {}
