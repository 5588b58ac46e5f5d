"""The rollbacks of jobs that have ended, from the records of their coordinators, and what each has cost in words.

Invariant: a rollback loses work. What was lost is said, also if it is not known how much it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from migrator import formatting
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError


@dataclass(frozen=True)
class Rollback:
    """One rollback after which the job was resumed, or given up."""

    record: str
    job: str
    user_id: int
    ranks: int
    coordinator: str
    snapshot: str
    begun_unix_s: float
    ended_unix_s: float
    resumed: bool
    lost_s: float | None  # None: unknown
    down_s: float
    reason: str
    decided_by: str

    @property
    def words(self) -> str:
        return described(self.lost_s, self.down_s if self.resumed else None, self.reason)

    def to_json(self) -> dict[str, Any]:
        return {
            "record": self.record,
            "job": self.job,
            "user_id": self.user_id,
            "rank_count": self.ranks,
            "coordinator": self.coordinator,
            "snapshot": self.snapshot,
            "outcome": "rolled back",
            "resumed": self.resumed,
            "lost_s": None if self.lost_s is None else round(self.lost_s, 3),
            "down_s": round(self.down_s, 3),
            "reason": self.reason,
            "decided_by": self.decided_by,
            "begun_unix_s": round(self.begun_unix_s, 3),
            "ended_unix_s": round(self.ended_unix_s, 3),
            "text": self.words,
        }


def described(lost_s: float | None, down_s: float | None, reason: str) -> str:
    """A rollback in words: "rolled back 143 s, down 11.8 s, node-7 lost (does not answer)". `lost_s` None: it is unknown.
    `down_s` None: the job was not resumed."""
    lost = " (lost time unknown)" if lost_s is None else f" {_rounded(lost_s)}"
    down = "given up" if down_s is None else f"down {_rounded(down_s)}"
    return f"rolled back{lost}, {down}, {reason}"


def _rounded(value_s: float) -> str:
    return f"{value_s:.0f} s" if value_s >= 60 else formatting.seconds(value_s)


async def all_rollbacks(cluster: Cluster) -> tuple[list[Rollback], dict[str, SnapshotError]]:
    """The rollbacks that have ended, of all coordinators, and the nodes that did not answer."""

    async def ask(client: DaemonClient) -> pb.ListJobsReply:
        return await listed(client, ASK_TIMEOUT_S)

    answers, silent = await ask_all(cluster, ask)
    return [one for node, reply in answers.items() for one in ended(node, reply)], silent


async def listed(client: DaemonClient, timeout_s: float) -> pb.ListJobsReply:
    try:
        return await client.job.List(pb.ListJobsRequest(rollbacks_only=True), timeout_s=timeout_s)
    except UnknownMethod:  # an older daemon has no such records
        return pb.ListJobsReply()


def ended(node: str, reply: pb.ListJobsReply) -> list[Rollback]:
    """Those of one coordinator after which the job was resumed or given up."""
    found = []
    for record in reply.jobs:
        given_up = bool(record.ended_unix_s) and record.ended_by.startswith("dropped")
        if record.kind == "rollback" and record.outcome == pb.COMMIT and (record.resumed_unix_s or given_up):
            found.append(
                Rollback(
                    record.record,
                    record.job,
                    record.user_id,
                    record.ranks,
                    node,
                    record.snapshot,
                    record.begun_unix_s,
                    record.resumed_unix_s or record.ended_unix_s,
                    record.resumed_unix_s > 0,
                    record.lost_s if record.HasField("lost_s") else None,
                    record.down_s,
                    record.reason,
                    record.decided_by,
                )
            )
    return found
