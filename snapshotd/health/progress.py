"""Ranks that stopped making progress, and the rank of a job that the others wait for. Pure: over recorded counters.

The counters are the operations that a rank has given to NCCL (snapshotd/inprocess/ncclctl.py). A training job repeats itself,
so its operations per second are steady, and a rank that is slower than the others has given fewer operations than they have:
they run ahead of it by as much as the GPU's queue allows, and then wait. Some rank is always the last one, so that alone
means nothing: the job must also have become slower than it was. A rank that was slow from the beginning is not recognised.

Nothing here reads counters: no check uses this yet.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

#: A rank is stalled after this many of its usual intervals between operations, and not before LEAST_STALL_S: evaluations,
#: checkpoints and a compilation at the first step take long in healthy jobs.
STALL_INTERVALS = 100.0
LEAST_STALL_S = 300.0
#: Readings over which a rank's usual interval is measured, and a job's rate.
WINDOW = 60
#: A rank is the straggler if it was the last one in this share of the readings, of which there must be some.
BEHIND_SHARE = 0.8
LEAST_READINGS = 20
#: Less than this share of the job's time is noise.
LEAST_LOSS = 0.05


@dataclass(frozen=True)
class Stalled:
    for_s: float
    usual_s: float  # between two operations, while it made progress


class Progress:
    """One rank. Readings are (monotonic seconds, operations so far)."""

    def __init__(self) -> None:
        self._changed: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def add(self, now_s: float, operations: int) -> Stalled | None:
        """Whether it makes no progress, after this reading. A counter that shrank is that of a new process."""
        if self._changed and operations < self._changed[-1][1]:
            self._changed.clear()
        if not self._changed or operations > self._changed[-1][1]:
            self._changed.append((now_s, operations))
            return None
        if len(self._changed) < 2:  # it may not have begun
            return None
        (first_s, first), (last_s, last) = self._changed[0], self._changed[-1]
        usual_s = (last_s - first_s) / (last - first)
        for_s = now_s - last_s
        return Stalled(for_s, usual_s) if for_s >= max(LEAST_STALL_S, STALL_INTERVALS * usual_s) else None

    def moved(self) -> None:
        """It was paused on purpose: what follows is measured from the next reading on."""
        self._changed.clear()


@dataclass(frozen=True)
class Straggler:
    rank: str
    behind: float  # operations, as the median of the readings
    lost_share: float  # of the job's time, compared with the best rate that the job has had


class Job:
    """The ranks of one communicator, read at about the same times."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=WINDOW)
        self._best_per_s = 0.0

    def add(self, now_s: float, operations: Mapping[str, int]) -> Straggler | None:
        """The rank that the others wait for, after this reading; None if there is none, or it is not certain."""
        if self._readings and set(self._readings[-1][1]) != set(operations):
            self._readings.clear()  # another set of ranks is another job
        self._readings.append((now_s, dict(operations)))
        if len(operations) < 2 or len(self._readings) < LEAST_READINGS:
            return None
        rate_per_s = self._rate_per_s()
        self._best_per_s = max(self._best_per_s, rate_per_s)
        lost_share = 1 - rate_per_s / self._best_per_s if self._best_per_s > 0 else 0.0
        last = [_last(reading) for _, reading in self._readings]
        named = [rank for rank in last if rank is not None]
        if not named or lost_share < LEAST_LOSS:
            return None
        rank = statistics.mode(named)
        if named.count(rank) < BEHIND_SHARE * len(last):
            return None
        behind = statistics.median(_behind(reading, rank) for _, reading in self._readings)
        return Straggler(rank, behind, lost_share)

    def _rate_per_s(self) -> float:
        """Of the slowest rank, which is that of the job."""
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        return (min(last.values()) - min(first.values())) / (last_s - first_s) if last_s > first_s else 0.0


def _last(reading: Mapping[str, int]) -> str | None:
    """The only rank that has given the fewest operations; None if several have."""
    fewest = min(reading.values())
    found = [rank for rank, count in reading.items() if count == fewest]
    return found[0] if len(found) == 1 else None


def _behind(reading: Mapping[str, int], rank: str) -> float:
    return statistics.median(count for other, count in reading.items() if other != rank) - reading[rank]
