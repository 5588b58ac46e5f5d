"""Removes snapshots that are not needed any more: of jobs that have ended, and images that their coordinator has given up.

Invariant: a coordinator gives up the last snapshot of a job only if every node of the cluster answers that it knows no rank
of the job, and the job is not waiting to be resumed. A node drops an image only if its coordinator says so.
"""

from __future__ import annotations

import logging

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves.jobs import records, snapshots
from snapshotd.moves.jobs.coordinator import JobSteps
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.repeated import Repeated

log = logging.getLogger(__name__)

EVERY_S = 5.0
ASK_S = 5.0


class Watch:
    """One instance per daemon."""

    def __init__(self, node: Node, jobs: JobSteps, images: StoredImages) -> None:
        self.node, self.jobs, self.images = node, jobs, images
        self.repeated = Repeated("snapshots of jobs", self.look, EVERY_S)

    async def look(self) -> None:
        """Looks once at all snapshots of which this node is the coordinator, and at all images that it keeps."""
        for snapshot in await in_thread(records.current, self.node.journal):
            if not snapshot.ended_unix_s or await snapshots.why_needed(self.node, snapshot):
                continue
            if not await in_thread(self.jobs.leases.lost, records.uids(snapshot)):  # else its successor decides
                await self.jobs.give_up(snapshot, "the job has ended")
        for snapshot in await in_thread(records.handed_over, self.node.journal):
            if await self._successor_has_forgotten(snapshot):
                await in_thread(snapshot.mark, snapshot.last_mark, dropped="its successor does not need it any more")
        for move_log in self.images.of_snapshots():
            if reason := await self._given_up(move_log):
                await self.images.drop(move_log.move, reason, "")
        await self.jobs.promises.sweep()

    async def _successor_has_forgotten(self, snapshot: MoveLog) -> bool:
        whole = await in_thread(snapshot.whole)
        endpoint = next((node.endpoint for node in whole.nodes if node.name == whole.handed_to), "")
        if not endpoint:
            return False
        try:
            async with self.node.client(whole.handed_to, endpoint) as client:
                found = await client.job.GetOutcome(pb.MoveRequest(move=snapshot.move), timeout_s=ASK_S)
        except NotFound:
            return True
        except SnapshotError:
            return False
        return bool(found.dropped)

    async def _given_up(self, move_log: MoveLog) -> str:
        """Why the coordinator of an image does not need it any more; empty: it does, or does not answer."""
        begin, whole = move_log.begin, await in_thread(move_log.whole)
        node, endpoint = begin.coordinator_node, begin.coordinator_endpoint
        if whole.successor_node:
            node, endpoint = whole.successor_node, whole.successor_endpoint
        try:
            async with self.node.client(node, endpoint) as client:
                found = await client.job.GetOutcome(pb.MoveRequest(move=begin.coordinator), timeout_s=ASK_S)
        except NotFound:
            return "its coordinator does not know it any more"
        except SnapshotError:
            return ""
        return found.dropped
