"""Decides how often written pages are sent again, and how fast, so that the job loses little time.

Pure: no I/O, no clock. What the job loses has two parts. It waits for processors that this work uses; that is measured, and
`Pace` limits the work. And each page that was protected costs a page fault when it is written; that is computed. Protecting
pages less often would not help: those that are written meanwhile would have to be sent again. So a round in which the faults
have cost more than the limit is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A rank, or what a round has found, that is smaller is left to the pause.
LEAST_BYTES = 64 << 20
SMALL_BYTES = 16 << 20
#: A round with more than this part of the one before shows that the job writes faster than is sent.
SHRINKS = 0.8
MAX_ROUNDS = 30
#: Of all rounds, with their holes. The target takes a million chunks of a move, and the image needs some of them.
MOST_BYTES = 1 << 38
#: One minor fault on a page that is protected, and the work of the kernel around it.
FAULT_S = 1e-6
PAGE_BYTES = 4096
MOST_SHARE, LEAST_SHARE = 0.9, 0.02


def go_on(sent_bytes: Sequence[int], total_bytes: int, elapsed_s: float, limit_s: float) -> bool:
    """Whether another round is worth its time. `sent_bytes`: of each round so far, `total_bytes`: of all slots."""
    if not sent_bytes:
        return True
    if (len(sent_bytes) + 1) * total_bytes > MOST_BYTES:
        return False
    if elapsed_s >= limit_s or len(sent_bytes) >= MAX_ROUNDS or sent_bytes[-1] <= max(SMALL_BYTES, total_bytes // 64):
        return False
    return len(sent_bytes) == 1 or sent_bytes[-1] < sent_bytes[-2] * SHRINKS


def lost_by_faults(written_bytes: int, since_s: float, busy: float) -> float:
    """The part of its time that the job has lost by page faults. `written_bytes`: what a scan has found, `since_s`: since the
    one before; `busy`: how many of the job's threads run at a time."""
    return written_bytes / PAGE_BYTES * FAULT_S / (max(since_s, 0.001) * max(1.0, busy))


@dataclass(slots=True)
class Pace:
    """The share of the time in which there is work. The rest is for comparison: how much longer the job waits for processors
    while there is work than while there is none. So the load of other programs does not count."""

    limit: float
    share: float = 0.5
    _working: float | None = None  # the part of its time that the job waits, smoothed
    _resting: float | None = None

    def measured(self, working: float, resting: float) -> None:
        """The parts of its time that the job has waited during the last work, and during the rest after it."""
        self._working = _smoothed(self._working, working)
        self._resting = _smoothed(self._resting, resting)
        more = self._working - self._resting
        # It loses `more` of its time during work. The limit is for all of the time.
        wanted = MOST_SHARE if more <= 0 else self.limit / more
        self.share = min(MOST_SHARE, max(self.limit, wanted, LEAST_SHARE))

    def rest_s(self, worked_s: float) -> float:
        """How long to rest after so much work."""
        return worked_s * (1 / self.share - 1)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before * 0.7 + now * 0.3
