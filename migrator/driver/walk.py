"""Executes the steps of the table in order and renews the lease while they run."""

from __future__ import annotations

import asyncio
import contextlib
import time

from migrator.driver import predicting, steps, undo
from migrator.driver.result import result
from migrator.driver.run import Run
from migrator.protocol import COMMIT, PREPARE, TABLE, Step, Verdict
from migrator.results import MoveResult
from snapshotd.api.errors import Refused, SnapshotError, Timeout, Undone, Where


class Walk:
    """One walk through the table."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.began = time.monotonic()
        self.renewing: asyncio.Task[None] | None = None
        self.estimating: asyncio.Task[None] | None = None
        self.beside: asyncio.Task[None] | None = None  # a step that is done while the next one is

    def interrupt(self, work: asyncio.Task[MoveResult]) -> None:
        """Ctrl-C: before COMMIT the current step is cancelled and the move undone; after COMMIT it is finished."""
        if self.run.reached < COMMIT:
            work.cancel()
        else:
            self.run.reporter.note("the move is committed: finishing it")

    async def drive(self) -> MoveResult:
        run = self.run
        try:
            await steps.preflight(run)
            steps.refuse_if_checks_do(run)
            self.estimating = asyncio.create_task(predicting.predict(run))
            try:
                await self._walk()
            finally:
                await self._end_beside()
            return result(run, Verdict.MOVED, "", Where.TARGET_RUNNING, None)
        except Refused as error:
            if run.reached < PREPARE:
                return result(run, Verdict.REFUSED, error.message, Where.SOURCE_RUNNING, error)
            return await undo.end(run, error)
        except (SnapshotError, asyncio.CancelledError) as error:
            if run.reached < PREPARE and isinstance(error, SnapshotError):
                raise  # only questions were asked: there is nothing to undo, and the error has its own exit code
            return await undo.end(run, error if isinstance(error, SnapshotError) else Undone("interrupted"))
        finally:
            for task in filter(None, (self.renewing, self.estimating)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _walk(self) -> None:
        run = self.run
        for run.reached in range(PREPARE, len(TABLE)):
            step = TABLE[run.reached]
            if step.beside_next:
                self.beside = asyncio.create_task(self._do_beside(step, self._time_left(step)))
                continue
            await steps.perform(run, step, self._time_left(step))
            if self.beside is not None:
                await self.beside
                self.beside = None
            if step.action == "Begin":
                self.renewing = asyncio.create_task(self._renew())

    async def _do_beside(self, step: Step, timeout_s: float) -> None:
        with self.run.reporter.span(step.action, step.phase):
            await steps.STEPS[step.action](self.run, timeout_s)

    async def _end_beside(self) -> None:
        """Before an undo: no request of the step may be under way then."""
        if self.beside is not None:
            self.beside.cancel()
            await asyncio.gather(self.beside, return_exceptions=True)

    def _time_left(self, step: Step) -> float:
        """The step's own time-out, or what is left of --timeout, which counts up to COMMIT."""
        limit_s = self.run.options.timeout_s
        if limit_s is None or self.run.reached >= COMMIT:
            return step.timeout_s
        left_s = min(step.timeout_s, limit_s - (time.monotonic() - self.began))
        if left_s <= 0:
            raise Timeout(f"--timeout {limit_s:.0f} s expired before {step.phase}")
        return left_s

    async def _renew(self) -> None:
        every_s = self.run.options.lease_s / 4
        while True:
            await asyncio.sleep(every_s)
            with contextlib.suppress(SnapshotError):
                await self.run.source.source.Renew(self.run.request, timeout_s=every_s)
