"""The report for the page, and the records of each job, without reading the whole event log at once.

Invariant: each look reads a bounded number of records, because the engine uses the same database connection. After a start
with a long log, the numbers are marked as incomplete until the tally has reached the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from migrator.autopilot import report
from migrator.autopilot.chain import Record
from migrator.autopilot.model import OUT
from migrator.autopilot.page.job_records import JobRecords
from migrator.autopilot.report import Interruption, NodeTimes
from migrator.autopilot.store import Store

DAYS = 30
DAY_S = 86400
CHUNK = 2000
#: Nodes with the most failures that are shown.
LEMONS = 5
#: Records that report.interruptions() uses.
_KINDS = frozenset({"intent", "result", "alert", "alert-over", "rollback", "suspension"})


class Tally:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._used: list[Record] = []
        self._read = 0
        self._day = 0
        self._headline: dict[str, Any] = {}
        self._by_job: dict[str, list[Interruption]] = {}
        self.records = JobRecords()

    def interruptions(self, job_key: str) -> Sequence[Interruption]:
        """Those of one job, the oldest first."""
        return self._by_job.get(job_key, ())

    async def headline(self) -> dict[str, Any]:
        """Reads on, and returns the numbers so far."""
        records = await self._store.events(self._read, CHUNK)
        for record in records:
            self.records.take(record)
        # The first record says since when nodes are watched.
        new = [record for record in records if record.id == 1 or _is_used(record)]
        if records:
            self._read = records[-1].id
        day = int(self._store.now() // DAY_S)
        if new or day != self._day:
            self._used, self._day = self._used + new, day
            self._build()
        return {**self._headline, "complete": len(records) < CHUNK}

    def _build(self) -> None:
        now = self._store.now()
        made = report.build(self._used, since_unix_s=now - DAYS * DAY_S, until_unix_s=now)
        self._by_job = {}
        for one in made.interruptions:
            self._by_job.setdefault(one.job, []).append(one)
        self._headline = {
            "days": DAYS,
            **made.total.to_json(),
            "without_software": made.without_software.to_json(),
            "classes": {name: share.to_json() for name, share in made.by_class.items() if share.all},
            "by_day": _by_day(made.interruptions, self._day),
            "today": self._day,
            "lemons": [_lemon(node) for node in made.nodes[:LEMONS]],
            "gpu_seconds": round(made.gpu_seconds, 1),
            "saved_gpu_hours": round(made.saved_gpu_hours, 1),
            "checkpoint_minutes": made.checkpoint_minutes,
            "restart_minutes": made.restart_minutes,
        }


def _is_used(record: Record) -> bool:
    """Of the states of nodes only those count that take a node out of use, or end that: others change often."""
    changed = record.kind == "state" and {record.data["from"], record.data["to"]} & OUT
    return bool(changed) or record.kind in _KINDS


def _by_day(interruptions: Sequence[Interruption], today: int) -> list[tuple[int, int]]:
    """For each day of UTC, the last one being today: those resolved without lost progress, and the others."""
    days = [[0, 0] for _ in range(DAYS)]
    for one in interruptions:
        at = int((one.decided_unix_s or one.detected_unix_s) // DAY_S) - today + DAYS - 1
        if 0 <= at < DAYS:
            days[at][0 if one.outcome == "moved" else 1] += 1
    return [(resolved, others) for resolved, others in days]


def _lemon(node: NodeTimes) -> dict[str, Any]:
    return {
        "node": node.node,
        "failures": node.failures,
        "mtbf_s": None if node.mtbf_s is None else round(node.mtbf_s),
        "mttr_s": None if node.mttr_s is None else round(node.mttr_s),
    }
