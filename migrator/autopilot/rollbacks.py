"""The rollbacks of jobs in the autopilot's event log. The coordinators' daemons decide and record them; here each is recorded
once, with what it has cost.

Invariant: a rollback is recorded as work that was lost, never as an interruption without a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from migrator.autopilot.database import Database, Transaction
from migrator.rollbacks import Rollback
from snapshotd.api import snapshotd_pb2 as pb

_KNOWN = "SELECT record FROM rollbacks WHERE node = ?"
#: What is believed of a node at a time, and of one text.
MOST = 1000
MOST_CHARS = 500


class RollbackRecords(Database):
    """A part of the store."""

    async def new_rollbacks(self, node: str, found: Sequence[Rollback]) -> list[Rollback]:
        """Those of a node that are not recorded yet, the oldest first."""
        if not found:
            return []
        known = {row["record"] for row in await self._all(_KNOWN, node)}
        return sorted((one for one in found if one.record not in known), key=lambda one: one.ended_unix_s)[:MOST]

    async def record_rollbacks(self, node: str, found: Sequence[Rollback]) -> None:
        """Records those that are not recorded yet."""

        def change(tx: Transaction) -> None:
            known = {row["record"] for row in tx.all(_KNOWN, node)}
            for one in found:
                if one.record not in known:
                    known.add(one.record)
                    tx.execute("INSERT INTO rollbacks VALUES (?, ?)", (node, one.record))
                    data = data_of(one)
                    tx.append("rollback", f"{one.job}: {one.words}"[:MOST_CHARS], node=node, data=data)

        await self._change(change)


def data_of(one: Rollback) -> dict[str, Any]:
    values = one.to_json() | {"job_key": f"{one.user_id}/{one.job}"}
    return {name: value[:MOST_CHARS] if isinstance(value, str) else value for name, value in values.items()}


def is_sane(reply: pb.ListJobsReply) -> bool:
    """Whether the times in an answer are numbers: a node may send what no daemon would."""
    times = [(one.lost_s, one.down_s, one.begun_unix_s, one.resumed_unix_s, one.ended_unix_s) for one in reply.jobs]
    return all(0 <= value < 1e12 for values in times for value in values)
