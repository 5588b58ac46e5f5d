"""Watches this node's memory while moves are in progress, and undoes a move before the kernel kills processes.

The memory of a move is reserved before anything is frozen (snapshotd/proc/room.py). But jobs may take memory that was free
then, and the kernel would find none to take back: images and stripes are in files, which belong to no process. So the move
that began last is undone early.

Invariant: only a move without an outcome is undone here. The next one is chosen when the previous one has ended, or if
memory is still short after AGAIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from snapshotd.api.errors import SnapshotError
from snapshotd.moves.moving import Moving
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.target import short_of_memory
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.proc.memory import stalled_percent
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES, Room, mib
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: How fast memory can be used up at most: this much is left unobserved between two looks.
_BYTES_PER_S = 8 << 30
_SHORTEST_S, _LONGEST_S = 0.02, 0.5
#: With less than twice the reserve left, processes that wait for memory this much of the time are a sign as well.
STALLED_PERCENT = 20.0
AGAIN_S = 5.0


def wait_s(left_bytes: int) -> float:
    """How long not to look, with this much memory left."""
    return min(_LONGEST_S, max(_SHORTEST_S, (left_bytes - FLOOR_BYTES) / _BYTES_PER_S))


def shortage(limited_by: str, left_bytes: int, stalled: float) -> str:
    """Why a move must be undone now, with the arithmetic; empty: memory is not short."""
    if left_bytes < FLOOR_BYTES:
        return (
            f"memory has run out during the move: {limited_by} has {mib(left_bytes)} left, less than the"
            f" {mib(FLOOR_BYTES)} that must stay free"
        )
    if left_bytes < 2 * RESERVE_BYTES and stalled >= STALLED_PERCENT:
        return (
            f"memory has become short during the move: {limited_by} has {mib(left_bytes)} left, and processes waited for"
            f" memory {stalled:.0f} % of the last 10 s"
        )
    return ""


class MemoryWatch:
    """One instance per daemon."""

    def __init__(self, room: Room, source: SourceSteps, target: TargetSteps) -> None:
        self._room, self._source, self._target = room, source, target
        self._task: asyncio.Task[None] | None = None
        self._undoing: tuple[Moving, float] | None = None
        self._work: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="watch memory")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._work) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            seconds = _LONGEST_S
            try:
                if self._open():
                    seconds = await self.look()
            except Exception:
                log.exception("watching memory")
            await asyncio.sleep(seconds)

    def _open(self) -> list[tuple[Moving, bool]]:
        """The moves that can be undone, the last one first, and whether this node is their source."""
        found = [(moving, True) for moving in self._source.moves.values() if moving.log.outcome is None]
        found += [(moving, False) for moving in self._target.moves.values() if moving.log.outcome is None]
        return sorted(found, key=lambda one: one[0].log.begin.begun_unix_s, reverse=True)

    async def look(self) -> float:
        """Looks once, and undoes a move if memory is short. Returns how long not to look again."""
        await in_thread(self._room.state)
        limited_by, left_bytes = self._room.left()
        stalled = stalled_percent() if left_bytes < 2 * RESERVE_BYTES else 0.0
        if why := shortage(limited_by, left_bytes, stalled):
            self._undo_one(why)
        return wait_s(left_bytes)

    def _undo_one(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._undoing is not None:
            moving, until = self._undoing
            if not moving.log.ended_unix_s and now < until:
                return
        candidates = [one for one in self._open() if not one[0].short_of_memory]
        if not candidates:
            return
        moving, here = candidates[0]
        moving.short_of_memory = why
        self._undoing = (moving, now + AGAIN_S)
        log.error("move %s of rank %s is undone: %s", moving.log.move, moving.log.begin.rank, why)
        task = asyncio.create_task(self._undo(moving, why, here=here), name=f"undo {moving.log.move}")
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _undo(self, moving: Moving, why: str, *, here: bool) -> None:
        with contextlib.suppress(SnapshotError):  # settling goes on with it
            if here:
                await self._source.abort(moving.log.move, why, "source")
            else:
                await short_of_memory.stop(self._target, moving, why)
