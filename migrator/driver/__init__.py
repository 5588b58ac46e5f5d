"""Executes the table of `migrator/protocol.py` against real daemons.

Invariant: the driver decides nothing. It asks, and the source's outcome record decides. If the driver dies at any point, the
daemons finish or undo the move without it (`snapshotd/moves/rules.py`). After an error the driver never guesses: it asks the
source for the record, and reports "unknown" if there is no answer.

A move that was undone because the rank changed between preflight and the freeze is tried again, ATTEMPTS times in all: each
attempt is a move of its own, with its own preflight, so nothing is assumed about what changed. No other failure is.

`walk.py` goes through the table, `steps.py` has one function per step, `undo.py` ends a move that failed, `run.py` has what a
move in progress knows, `reporter.py` times its phases, `result.py` builds the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from migrator.cluster import Cluster
from migrator.driver import predicting, steps
from migrator.driver.reporter import note
from migrator.driver.result import after_attempts
from migrator.driver.run import Run
from migrator.driver.trace import Trace
from migrator.driver.walk import Walk
from migrator.find_rank import find_node, find_rank
from migrator.protocol import Verdict
from migrator.results import CheckReport, Event, MoveOptions, MoveResult
from snapshotd.api.errors import Changed, Refused, SnapshotError, Where

#: How often a move is tried whose rank changes between preflight and the freeze.
ATTEMPTS = 3


def _worth_repeating(result: MoveResult) -> bool:
    return (result.outcome, result.where, result.error_code) == (Verdict.UNDONE, Where.SOURCE_RUNNING, Changed.code)


def _interrupted() -> bool:
    """Whether Ctrl-C came, and the attempt ended in its own way all the same."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def attempt_id(move: str, attempt: int) -> str:
    """The id of a later attempt at a move whose id the caller has chosen: it can be computed after a restart."""
    if not move or attempt == 0:
        return move
    return f"m-{hashlib.sha256(f'{move} {attempt}'.encode()).hexdigest()[:12]}"


class Driver:
    """Moves ranks of one cluster."""

    def __init__(self, cluster: Cluster, on_event: Callable[[Event], None], trace: Trace | None = None) -> None:
        self.cluster = cluster if trace is None else replace(cluster, watch=trace.watch)
        self.on_event = on_event
        self.trace = trace
        self._unwatched = cluster

    async def check(self, options: MoveOptions, *, estimate: bool = False) -> CheckReport:
        """Preflight only: nothing is paused, nothing is changed. With `estimate`, the pause is predicted too."""
        async with self._run(options) as run:
            await steps.preflight(run)
            if estimate:
                await predicting.predict(run)
            return CheckReport(run.found.node, options.to, run.found.rank, run.checks, run.estimate)

    async def move(self, options: MoveOptions) -> MoveResult:
        """One move, from start to end. If it is cancelled before COMMIT it is undone, after COMMIT it is finished.

        Raises only for what is wrong before a daemon was asked to change anything (unknown rank, unreachable node). Every
        later failure is in the result.
        """
        began = time.monotonic()
        undone: list[MoveResult] = []
        result = await self._attempt(options)
        while _worth_repeating(result) and len(undone) + 1 < ATTEMPTS and not _interrupted():
            undone.append(result)
            left_s = None if options.timeout_s is None else options.timeout_s - (time.monotonic() - began)
            if left_s is not None and left_s <= 0:
                break
            self.on_event(note(f"attempt {len(undone)} was undone, trying again: {result.reason}"))
            try:
                following = attempt_id(options.move, len(undone))
                result = await self._attempt(replace(options, timeout_s=left_s, move=following))
            except (SnapshotError, asyncio.CancelledError):
                break  # the state of the rank is what the last attempt reported
        return after_attempts(result, undone)

    async def _attempt(self, options: MoveOptions) -> MoveResult:
        """One attempt. Ctrl-C after its end changes nothing about the result; it only ends the collection of spans."""
        ended: MoveResult | None = None
        try:
            async with self._run(options, hurries=True) as run:
                try:
                    with self.trace.attempt(run.move) if self.trace is not None else contextlib.nullcontext():
                        ended = await self._walk(run)
                finally:
                    if self.trace is not None:
                        await self.trace.collect(self._unwatched, run)
        except asyncio.CancelledError:
            if ended is None:
                raise
        return ended

    async def _walk(self, run: Run) -> MoveResult:
        walk = Walk(run)
        work = asyncio.create_task(walk.drive())
        while True:
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                if work.cancelled():
                    raise
                if not work.done():  # otherwise it has ended in the same moment, and its result counts
                    walk.interrupt(work)

    @contextlib.asynccontextmanager
    async def _run(self, options: MoveOptions, *, hurries: bool = False) -> AsyncIterator[Run]:
        find_node(self.cluster, options.to)
        asked = (options.rank, options.job, options.user_id, options.source)
        found = await find_rank(self.cluster, *asked, hurries=hurries)
        if found.node == options.to:
            raise Refused(f"rank {options.rank} is already on {options.to}", remedy="choose another node with --to")
        async with self.cluster.client(found.node) as source, self.cluster.client(options.to) as target:
            span = None if self.trace is None else self.trace.span
            yield Run(self.cluster, options, found, source, target, self.on_event, span)
