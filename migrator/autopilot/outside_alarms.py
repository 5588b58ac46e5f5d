"""The part of the store that keeps alarms from outside (outside.py).

Invariant: as for all alarms, the change of the state and the record of it are one change. Such an alarm stays, also across
restarts, until its sender says that it is over or an operator clears it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from sqlite3 import Row

import msgspec

from migrator.autopilot import outside
from migrator.autopilot.database import Database, Transaction
from migrator.autopilot.model import Alarm
from migrator.autopilot.outside import Change, Known, Reported

SOURCE = "webhook"
_KNOWN = "SELECT node, alarm, data FROM alarms WHERE source = 'webhook'"


class OutsideAlarms(Database):
    async def take_signals(
        self, reported: Sequence[Reported], by: str, allowed: Callable[[int], bool] = lambda records: True
    ) -> Counter[str] | None:
        """Takes in what a sender reported: how many alarms were raised, repeated, cleared, unchanged and refused.

        None: that would be more records than `allowed` permits, and nothing was changed. If the change fails, `allowed` gets
        their number back (negative).
        """
        expected = outside.plan(_alarms(await self._all(_KNOWN)), reported, self.now())
        if not expected.changes:
            return expected.outcomes
        if not allowed(expected.records):
            return None

        def change(tx: Transaction) -> Counter[str]:
            made = outside.plan(_alarms(tx.all(_KNOWN)), reported, self.now())
            _write(tx, made.changes, by)
            return made.outcomes

        try:
            return await self._change(change)
        except Exception:
            allowed(-expected.records)
            raise

    async def clear_signals(self, node: str, by: str, check: str = "", subject: str = "") -> list[Alarm]:
        """Ends alarms from outside by an operator's word. Returns them."""
        if not outside.matching(_alarms(await self._all(_KNOWN)), node, check, subject):
            return []

        def change(tx: Transaction) -> list[Alarm]:
            found = outside.matching(_alarms(tx.all(_KNOWN)), node, check, subject)
            _write(tx, [Change(*place, alarm, "cleared") for place, alarm in found.items()], by)
            return list(found.values())

        return await self._change(change)

    async def own_alarms(self) -> list[tuple[str, Alarm]]:
        """The alarms that no daemon has, with their source: autopilot, jobs or webhook."""
        rows = await self._all("SELECT source, data FROM alarms WHERE source != 'node' ORDER BY node, alarm")
        return [(row["source"], msgspec.json.decode(row["data"], type=Alarm)) for row in rows]


def _alarms(rows: Sequence[Row]) -> Known:
    return {(row["node"], row["alarm"]): msgspec.json.decode(row["data"], type=Alarm) for row in rows}


def _write(tx: Transaction, changes: Sequence[Change], by: str) -> None:
    for change in changes:
        alarm = change.alarm
        if change.ended:
            tx.execute(
                "DELETE FROM alarms WHERE node = ? AND source = ? AND alarm = ?", (change.node, SOURCE, change.key)
            )
        else:
            values = (change.node, SOURCE, change.key, msgspec.json.encode(alarm).decode())
            tx.execute("INSERT OR REPLACE INTO alarms VALUES (?, ?, ?, ?)", values)
        if change.word:
            text = f"{change.word} by {by}: {alarm.check} on {alarm.subject}: {alarm.text}"
            data = {**asdict(alarm), "severity": alarm.severity.name, "kind": change.word, "by": by, "key": change.key}
            tx.append("signal", text, node=change.node, data=data)
