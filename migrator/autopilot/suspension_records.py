"""The jobs that the autopilot suspends, in its database and event log.

Invariant: a job has at most one suspension that is not over. Every change of it is recorded, in words.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

import msgspec

from migrator.autopilot.database import Database, Transaction
from migrator.autopilot.suspension import Suspension, SuspensionState
from snapshotd.api.errors import WrongState

_LOADED = "SELECT data FROM suspensions WHERE ended_unix_s = 0 OR ended_unix_s >= ? ORDER BY rowid"
_OPEN = "SELECT data FROM suspensions WHERE ended_unix_s = 0"


class SuspensionRecords(Database):
    """A part of the store."""

    async def intend_suspension(self, one: Suspension) -> None:
        """Records that a job is to be suspended. Raises WrongState if it is suspended, or is being suspended."""

        def change(tx: Transaction) -> None:
            known = [_decoded(row["data"]) for row in tx.all(_OPEN)]
            if any(other.job_key == one.job_key for other in known):
                raise WrongState(f"job {one.job} is suspended already, or is being suspended")
            tx.execute("INSERT INTO suspensions VALUES (?, 0, ?)", (one.id, _encoded(one)))
            _append(tx, one)

        await self._change(change)

    async def change_suspension(self, number: str, before: Collection[SuspensionState], **values: Any) -> bool:
        """Changes values of a suspension that is in one of these states. Returns False if it is not."""

        def change(tx: Transaction) -> bool:
            row = tx.one("SELECT data FROM suspensions WHERE id = ?", number)
            known = _decoded(row["data"]) if row is not None else None
            if known is None or known.state not in before:
                return False
            made = replace(known, **values)
            if not made.open:
                made = replace(made, ended_unix_s=made.ended_unix_s or self.now())
            values_now = (made.ended_unix_s, _encoded(made), number)
            tx.execute("UPDATE suspensions SET ended_unix_s = ?, data = ? WHERE id = ?", values_now)
            _append(tx, made)
            return True

        return await self._change(change)

    async def suspensions(self, since_unix_s: float = 0.0) -> tuple[Suspension, ...]:
        """Those that are not over, and those that ended since then."""
        return tuple(_decoded(row["data"]) for row in await self._all(_LOADED, since_unix_s))


def words(one: Suspension) -> str:
    """What has become of it, for the record."""
    targets = ", ".join(dict.fromkeys(rank.target for rank in one.ranks))
    match one.state:
        case SuspensionState.SUSPENDING:
            return f"is being {one.reason}"
        case SuspensionState.SUSPENDED:
            return f"still suspended, not resumed: {one.result}" if one.result else one.reason
        case SuspensionState.RESUMING:
            return f"is being resumed on {targets}"
        case SuspensionState.RESUMED:
            return f"resumed on {targets} after {one.ended_unix_s - one.intended_unix_s:.0f} s"
        case SuspensionState.NOT_SUSPENDED | SuspensionState.NEVER_BEGAN:
            return f"not suspended: {one.result}"
    return one.result


def _append(tx: Transaction, one: Suspension) -> None:
    tx.append(
        "suspension", f"job {one.job_key}: {words(one)}", node=one.node, data=asdict(one) | {"job_key": one.job_key}
    )


def _encoded(one: Suspension) -> str:
    return msgspec.json.encode(one).decode()


def _decoded(text: str) -> Suspension:
    return msgspec.json.decode(text, type=Suspension)
