"""Makes the readings of all ranks of this node at the times of the schedule, and keeps the last ones for the autopilot.

Invariant: nothing is read while a move is running on this node, so that no reading lengthens the pause of a rank. The
ranks of one user are read in threads of their own: memory that does not answer delays nothing but readings of the same
user.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry
from snapshotd.progress import schedule
from snapshotd.progress.measures import Key, Rank, Reading, read_twice
from snapshotd.progress.unchanged import Unchanged
from snapshotd.runtime.blocking import Lane, in_thread

log = logging.getLogger(__name__)

#: Between two looks for stalls and for new communicators.
MEASURE_S = 5.0
#: Readings that are kept: the autopilot asks every few seconds.
KEPT = 240
_LANE = Lane("progress", threads=16, each=1)


@dataclass
class _Series:
    """One rank: what is known of it, and the last readings of each of its communicators."""

    user_id: int
    rank: Rank
    kind: pb.RankProgress.Measure.ValueType = pb.RankProgress.MEASURE_UNSPECIFIED
    unchanged: Unchanged = field(default_factory=Unchanged)
    readings: dict[Key, deque[tuple[int, Reading]]] = field(default_factory=dict)


class Sampler:
    """`entries`: the ranks that this node knows. `moving`: whether a move is running here. `period_s`: 0 switches it off."""

    def __init__(self, entries: Callable[[], Iterable[RankEntry]], moving: Callable[[], bool], period_s: float) -> None:
        self._entries, self._moving, self._period_s = entries, moving, period_s
        self._series: dict[str, _Series] = {}
        self._working: dict[tuple[str, int], asyncio.Task[None]] = {}  # by kind of work and user
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self._period_s:
            self._tasks = [
                asyncio.create_task(self._measure_always(), name="progress: measures"),
                asyncio.create_task(self._read_always(), name="progress: readings"),
            ]

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._working.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def since(self, request: pb.GetProgressRequest) -> pb.NodeProgress:
        ranks = [_message(uid, series, request.after) for uid, series in sorted(self._series.items())]
        return pb.NodeProgress(now_unix_s=time.time(), period_ms=round(self._period_s * 1000), ranks=ranks)

    # ------------------------------------------------------------ stalls

    async def _measure_always(self) -> None:
        while True:
            self._follow()
            if self._moving():
                for series in self._series.values():
                    series.unchanged.paused(time.monotonic())
            else:
                self._for_each_user("measures", self._measure)
            await asyncio.sleep(MEASURE_S)

    def _follow(self) -> None:
        """Keeps to the ranks whose processes are here."""
        here = {entry.uid: entry for entry in self._entries() if not entry.away_node and entry.pid and not entry.moving}
        self._series = {uid: series for uid, series in self._series.items() if uid in here}
        for uid, entry in here.items():
            known = self._series.get(uid)
            if known is None or known.rank.group.path != entry.group.path:
                self._series[uid] = _Series(entry.user_id, Rank(entry.group))

    async def _measure(self, mine: dict[str, _Series]) -> None:
        def measured() -> list[tuple[_Series, pb.RankProgress.Measure.ValueType, int]]:
            return [(series, *series.rank.measure(time.monotonic())) for series in mine.values()]

        for series, kind, value in await in_thread(measured):
            series.kind = kind
            series.unchanged.add(time.monotonic(), kind, value)

    # ------------------------------------------------------------ stragglers

    async def _read_always(self) -> None:
        last = 0
        while True:
            now_s = time.time()
            number = schedule.number_at(now_s, self._period_s)
            if number == last or schedule.time_of(number, self._period_s) <= now_s:
                number += 1
            last, at_s = number, schedule.time_of(number, self._period_s)
            await asyncio.sleep(at_s - now_s)
            if not self._moving():
                self._for_each_user("readings", partial(self._read, number=number, at_s=at_s))

    async def _read(self, mine: dict[str, _Series], number: int, at_s: float) -> None:
        ranks = {uid: series.rank for uid, series in mine.items() if series.rank.found}
        if not ranks:
            return
        for uid, found in (await in_thread(read_twice, ranks, at_s)).items():
            readings = mine[uid].readings
            for key, reading in found.items():
                readings.setdefault(key, deque(maxlen=KEPT)).append((number, reading))
            for key in [key for key in readings if readings[key][-1][0] < number - KEPT]:
                del readings[key]  # the communicator has ended

    def _for_each_user(self, kind: str, work: Callable[[dict[str, _Series]], Awaitable[None]]) -> None:
        """Begins the work for the ranks of each user for which none of this kind is in progress."""
        by_user: dict[int, dict[str, _Series]] = {}
        for uid, series in self._series.items():
            by_user.setdefault(series.user_id, {})[uid] = series
        for user, mine in by_user.items():
            if (kind, user) not in self._working:
                task = asyncio.create_task(_with_turn(user, mine, work), name=f"progress: {kind} of user {user}")
                self._working[kind, user] = task
                task.add_done_callback(partial(self._done, (kind, user)))

    def _done(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        self._working.pop(key)


async def _with_turn(
    user: int, mine: dict[str, _Series], work: Callable[[dict[str, _Series]], Awaitable[None]]
) -> None:
    try:
        async with _LANE.turn(user):
            await work(mine)
    except Exception:
        log.exception("the progress of the ranks of user %d was not read", user)


def _message(uid: str, series: _Series, after: int) -> pb.RankProgress:
    made = pb.RankProgress(
        uid=uid, measure=series.kind, unchanged_s=series.unchanged.unchanged_s, usual_s=series.unchanged.usual_s
    )
    for (comm, member), readings in series.readings.items():
        new = [(number, reading) for number, reading in readings if number > after]
        if new:
            made.communicators.add(
                id=comm,
                nranks=new[-1][1].nranks,
                member=member,
                numbers=[number for number, _ in new],
                early=[reading.early for _, reading in new],
                late=[reading.late for _, reading in new],
            )
    return made
