"""How fast a job was during the last minutes, for people to look at. Pure: over complete readings of its counters.

Nothing is decided by this (stragglers.py does that). A time without complete readings, such as the pause of a move, is a gap
and not a standstill: nothing is known about it.

The period of the steps is recognised only if the counters show it: the job must make no collective for a second or
more in every step, because the counters are read only twice a second. Then each step makes the same number of collectives,
and takes about the same time. A shorter period would be invented: readings twice a second cannot show it.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

#: Each point is the rate of so long, and so many are kept: ten minutes.
POINT_S, POINTS = 5.0, 120
#: A longer time between two readings is a gap.
GAP_S = 3.0
#: A step begins after the counters stood still for so long.
STILL_S = 1.0
#: Pauses that one step may have, the steps that must have been alike, and how much their times may differ.
MOST_PAUSES, LEAST_STEPS, SPREAD = 4, 4, 0.2


@dataclass(frozen=True)
class Period:
    """The recognised step of a job."""

    seconds: float
    collectives: int


@dataclass(frozen=True)
class Pace:
    points: tuple[tuple[float, float], ...]  # time and collectives in a second, the oldest first
    period: Period | None


class History:
    """One job."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=POINTS)
        self._comm = 0
        self._first = self._last = (0.0, 0)  # readings: of the point that is being made, and the newest
        self._changed_s = 0.0
        self._began: deque[tuple[float, int]] = deque(maxlen=MOST_PAUSES * LEAST_STEPS + 1)  # after the pauses

    def add(self, unix_s: float, comm: int, count: int) -> None:
        """One reading: how many collectives the slowest member of the widest communicator had made."""
        before_s, before = self._last
        if comm != self._comm or count < before or not before_s < unix_s <= before_s + GAP_S:
            self._comm, self._first, self._changed_s = comm, (unix_s, count), unix_s
            self._began.clear()
        elif count > before:
            if before_s - self._changed_s >= STILL_S:
                self._began.append((unix_s, before))
            self._changed_s = unix_s
        self._last = unix_s, count
        since_s, since = self._first
        if unix_s // POINT_S > since_s // POINT_S:
            self._points.append((since_s // POINT_S * POINT_S, (count - since) / (unix_s - since_s)))
            self._first = self._last

    @property
    def newest_unix_s(self) -> float:
        return self._last[0]

    @property
    def pace(self) -> Pace:
        least_s = self._last[0] - POINT_S * POINTS
        return Pace(tuple(point for point in self._points if point[0] >= least_s), self._period())

    def _period(self) -> Period | None:
        """A step may have several pauses: then the numbers of collectives between them repeat."""
        steps = [(late[0] - early[0], late[1] - early[1]) for early, late in itertools.pairwise(self._began)]
        for pauses in range(1, MOST_PAUSES + 1):
            if len(steps) < pauses * LEAST_STEPS:
                return None
            mine = steps[-pauses * LEAST_STEPS :]
            counts = [count for _, count in mine]
            if any(one != other for one, other in zip(counts, counts[pauses:], strict=False)):
                continue
            times = [sum(time for time, _ in mine[at : at + pauses]) for at in range(0, len(mine), pauses)]
            mean_s = sum(times) / len(times)
            if max(times) - min(times) > max(STILL_S, SPREAD * mean_s):
                continue
            is_new = self._last[0] - self._began[-1][0] <= 2 * mean_s
            return Period(mean_s, sum(counts[:pauses])) if is_new else None
        return None
