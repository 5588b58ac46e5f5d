"""The headline of the report for the page, without reading the whole event log at once.

Invariant: each look reads a bounded number of records, because the engine uses the same database connection. After a start
with a long log, the numbers are marked as incomplete until the tally has reached the end.
"""

from __future__ import annotations

from typing import Any

from migrator.autopilot import report
from migrator.autopilot.chain import Record
from migrator.autopilot.store import Store

DAYS = 30
CHUNK = 2000
#: Records that report.interruptions() uses.
_KINDS = frozenset({"intent", "result", "alert", "alert-over"})


class Tally:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._used: list[Record] = []
        self._read = 0
        self._headline: dict[str, Any] = {}

    async def headline(self) -> dict[str, Any]:
        """Reads on, and returns the numbers so far."""
        records = await self._store.events(self._read, CHUNK)
        new = [record for record in records if record.kind in _KINDS]
        if records:
            self._read = records[-1].id
        if new or not self._headline:
            self._used += new
            now = self._store.now()
            made = report.build(self._used, since_unix_s=now - DAYS * 86400, until_unix_s=now)
            self._headline = {
                "days": DAYS,
                **made.total.to_json(),
                "classes": {name: share.to_json() for name, share in made.by_class.items() if share.all},
                "gpu_seconds": round(made.gpu_seconds, 1),
                "saved_gpu_hours": round(made.saved_gpu_hours, 1),
            }
        return {**self._headline, "complete": len(records) < CHUNK}
