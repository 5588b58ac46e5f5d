"""Which records of the event log are about which job.

Invariant: its size is bounded: so many records for each job or rank, and so many jobs and ranks, those of which nothing was
recorded for the longest time being forgotten first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from migrator.autopilot.chain import Record
from migrator.autopilot.page import view

KEPT = 60
SUBJECTS = 2000


class JobRecords:
    """By subject, which is the key of a job, or the uid of a rank where a record names only that."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._by_id: OrderedDict[tuple[str, Any], str] = OrderedDict()  # subjects of moves and of orders

    def take(self, record: Record) -> None:
        subject = self._subject(record)
        if not subject:
            return
        self._lines.setdefault(subject, deque(maxlen=KEPT)).append(view.line(record))
        self._lines.move_to_end(subject)
        if len(self._lines) > SUBJECTS:
            self._lines.popitem(last=False)

    def of(self, job_key: str, ranks: Iterable[str]) -> list[dict[str, Any]]:
        """The newest lines about a job, whose ranks are those, the newest first."""
        found = itertools.chain.from_iterable(self._lines.get(one, ()) for one in (job_key, *ranks))
        return sorted(found, key=lambda line: -line["id"])[:KEPT]

    def _subject(self, record: Record) -> str:
        data = record.data
        of_order = record.kind in ("order", "order-ended")
        kind = "order" if of_order else "move"
        if record.kind in ("result", "unknown", "order-ended"):
            return self._by_id.get((kind, data.get("id")), "")
        loss = data.get("loss") or {}
        checked = str(data.get("subject", ""))
        rank = str(data.get("rank_uid") or (checked.removeprefix("rank:") if checked.startswith("rank:") else ""))
        subject = str(data.get("job_key") or loss.get("job_key") or rank)
        if subject and record.kind in ("intent", "order"):
            self._by_id[kind, data.get("id")] = subject
            if len(self._by_id) > SUBJECTS:
                self._by_id.popitem(last=False)
        return subject
