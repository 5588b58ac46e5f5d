"""The gates of a job that is suspended or snapshotted as a whole: all its ranks wait at one cut. Its coordinator opens them.

Invariant: as in a move (`migrator/quiesce/gates.py`), this program only finds the cut. Nodes journal their gates before they
close them, and learn from the coordinator when to open them. If no rank is in a communicator, no gate is closed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence

from migrator.cluster import Cluster
from migrator.quiesce.gates import LOOK_S, LOOKS, Gates, ask_all, missing_members, reporting
from migrator.quiesce.process_reports import Membership, Numbers, ProcessReport
from snapshotd.api import snapshotd_pb2 as pb

#: How long the job may take to reach a point where all its ranks can wait.
QUIESCE_S = 30.0


class JobGates:
    """Every gate of one job."""

    def __init__(self, cluster: Cluster) -> None:
        self.gates = Gates(cluster)
        self.nonce = secrets.token_bytes(32)  # of no use, but every journalled gate has one
        self.involved = False

    async def check(self, description: pb.MoveDescription, nodes: Sequence[str]) -> list[pb.Check]:
        """Preflight: all members of all communicators are ranks of the job, and no gate refuses one of them."""
        unnamed = pb.MoveDescription(job=description.job, user_id=description.user_id)
        async with self.gates.clients(nodes) as clients:
            reports = await ask_all(clients, reporting(unnamed))
            missing = _unknown(reports)
            for _ in range(LOOKS - 1):
                if not missing:
                    break
                # Nodes do not report at the same moment: one that is just being created lacks a member once.
                await asyncio.sleep(LOOK_S)
                reports = await ask_all(clients, reporting(unnamed))
                again = _unknown(reports)
                missing = {comm: again[comm] for comm in missing if comm in again}
        self.involved = any(report.gate.communicators or report.gate.rdma for report in reports)
        checks = [
            pb.Check(
                name="nccl",
                verdict=pb.Check.REFUSE,
                reason=f"rank {report.rank}, process {report.process.pid}: communicator {comm.id}: {refusal}",
                remedy="shim/README.md lists what cannot be taken down; disable it, or try again when it is over",
            )
            for report in reports
            for comm in report.gate.communicators
            for refusal in comm.refusals
        ]
        return [*checks, missing_members(missing, ())] if missing else checks

    async def quiesce(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Closes all gates and lets each process run as far as the cut requires. On failure gates stay closed: undo."""
        await self.gates.quiesce(description, min(timeout_s, QUIESCE_S))


def _unknown(reports: Collection[ProcessReport]) -> dict[str, int]:
    """The communicators that have members which no process has reported to be, and how many."""
    numbers = Numbers()
    numbers.add(reports)
    membership = Membership.gather(reports, numbers)
    comms = {comm.id for report in reports for comm in report.gate.communicators}
    return {comm: count for comm in comms if (count := membership.unknown(comm))}
