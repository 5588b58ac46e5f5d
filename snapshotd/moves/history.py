"""Removes finished moves from the journals once they are too old or too many.

Invariant: a record that a node may still need is never removed. Every unfinished move stays. A finished one stays for a day,
because requests of its driver may arrive late, and until the other node has finished as well: a held copy on the target asks
the source for the outcome, and the source asks the target whether its copy ran. A node that does not answer may still ask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves.jobs.records import is_needed
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.moves.steps import Steps
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

DAY_S = 86400.0
#: No move is removed sooner after its end.
LEAST_AGE_S = DAY_S
AGAIN_S = 3600.0
ASK_S = 5.0


class History:
    """Periodically removes finished moves from the journals of this daemon."""

    def __init__(self, node: Node, steps: Iterable[Steps]) -> None:
        self.node, self._steps = node, list(steps)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="history")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.prune()
            except Exception:
                log.exception("old moves were not removed from the journal")
            await asyncio.sleep(AGAIN_S)

    async def prune(self, now_unix_s: float | None = None) -> list[str]:
        """Removes the moves that are too old or too many. Returns their ids."""
        now = time.time() if now_unix_s is None else now_unix_s
        removed = []
        for journal in {id(steps.journal): steps.journal for steps in self._steps}.values():
            await in_thread(journal.sweep_removed)
            for move_log in due(journal.all(), self.node.config.history_days, self.node.config.history_moves, now):
                if await needed_elsewhere(self.node, move_log):
                    continue
                for steps in self._steps:
                    if steps.journal is journal:
                        steps.moves.pop(move_log.move, None)
                await in_thread(journal.remove, move_log.move)
                removed.append(move_log.move)
        if removed:
            log.info("removed %d finished moves from the history", len(removed))
        return removed


def due(moves: Iterable[MoveLog], days: int, count: int, now_unix_s: float) -> list[MoveLog]:
    """The finished moves that are older than so many days, or beyond so many newer ones; oldest first."""
    ended = sorted((one for one in moves if finished(one)), key=lambda one: one.ended_unix_s, reverse=True)
    too_many = set(map(id, ended[count:]))
    ages = {id(one): now_unix_s - one.ended_unix_s for one in ended}
    return [
        one
        for one in reversed(ended)
        if ages[id(one)] > LEAST_AGE_S and (id(one) in too_many or ages[id(one)] > days * DAY_S)
    ]


def finished(move_log: MoveLog) -> bool:
    """Whether this node has nothing left to do. A target whose copy still runs has: its keeper may reconnect."""
    if move_log.last_mark is Mark.ACTIVATED:
        return not move_log.copy_exists()
    return bool(move_log.ended_unix_s)


async def needed_elsewhere(node: Node, move_log: MoveLog) -> bool:
    """Whether the other node of the move may still ask for this record."""
    begin, request = move_log.begin, pb.MoveRequest(move=move_log.move)
    ask: Callable[[], Awaitable[bool]]
    if begin.coordinator and node.store_of(begin).sealed(move_log.move):
        return True  # the job is suspended, or this is its snapshot
    if begin.role == "job":
        return await in_thread(is_needed, node.journal, move_log)
    if begin.coordinator:

        async def ask() -> bool:
            """The coordinator has no use for this record when all have carried out its own."""
            async with node.client(begin.coordinator_node, begin.coordinator_endpoint) as client:
                of_job = pb.MoveRequest(move=begin.coordinator)
                return not (await client.job.GetOutcome(of_job, timeout_s=ASK_S)).settled

    elif begin.role == "source" and move_log.aborted and begin.target_node:

        async def ask() -> bool:
            async with node.client(begin.target_node, begin.target_endpoint) as client:
                copy = await client.target.GetCopy(request, timeout_s=ASK_S)
            return copy.state not in {pb.Copy.DISCARDED, pb.Copy.NO_SUCH_MOVE}

    elif begin.role == "target" and move_log.last_mark is Mark.ACTIVATED:

        async def ask() -> bool:
            async with node.client(begin.source_node, begin.source_endpoint) as client:
                return not (await client.source.GetOutcome(request, timeout_s=ASK_S)).settled

    else:
        return False
    try:
        return await ask()
    except NotFound:
        return False
    except SnapshotError as error:
        log.debug("move %s stays in the history: %s", move_log.move, error.message)
        return True
