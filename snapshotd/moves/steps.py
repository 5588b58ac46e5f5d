"""Makes the steps of all roles idempotent by (move, step), and lets them run to completion once begun.

Every role (source, target, peer, gate) has its journal, its unfinished moves in memory, and one settle loop for each of them,
which carries out what a crash or a silent driver left undone. A move that has ended is in the journal only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from snapshotd.api.errors import Changed, NotFound, Refused, SnapshotError, Undone, Where, WrongState
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark
from snapshotd.moves.where import where_of
from snapshotd.runtime import heap
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.logs import move_context

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_running: set[asyncio.Task[Any]] = set()


def step(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Marks a step of a move. Once begun it runs to its end: gRPC cancels the call of a driver that died or timed out, but
    the rules do not allow for half a step (ACTIVATED written, but no process woken). The caller may repeat it:
    `Steps.working_on` and the marks make that harmless."""

    @functools.wraps(method)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(method(*args, **kwargs))
        _running.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(_finished)
        return await asyncio.shield(task)

    return shielded


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("a step ended with %s", error)  # its caller, if it is still there, gets the error itself


class Steps:
    """One role of this daemon."""

    role = ""
    #: Error text for a driver that asks about a move in which this role has no part.
    not_here = "move {move} is not known on this node"

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.moves: dict[str, Moving] = {}  # those that this daemon follows: they have not ended
        #: Others, while a call is at work on them: calls for the same move must have the same lock.
        self._recalled: WeakValueDictionary[str, Moving] = WeakValueDictionary()

    def moving(self, move: str) -> Moving:
        """The move. One that has ended is recalled from the journal. Raises NotFound."""
        found = self.moves.get(check_move_id(move)) or self._recalled.get(move)
        if found is None:
            move_log = self.journal.find(move)
            if move_log is None or move_log.begin.role != self.role:
                raise NotFound(self.not_here.format(move=move))
            found = self._recalled[move] = self.recall(move_log)
        return found

    def recall(self, move_log: MoveLog) -> Moving:
        """A move that is only in the journal."""
        return Moving(move_log)

    def must_be_open(self, moving: Moving) -> None:
        """Raises WrongState when the move has an outcome already, or cannot go on."""
        if (outcome := moving.log.outcome) is not None:
            raise WrongState(
                f"move {moving.log.move} has ended: {outcome.outcome} ({outcome.reason})", where=where_of(moving.log)
            )

    @asynccontextmanager
    async def working_on(
        self, move: str, phase: str, at: Collection[Mark] = (), otherwise: str = ""
    ) -> AsyncIterator[Moving]:
        """The open move, locked, with its log context. Raises WrongState unless its last mark is one of `at`, if given."""
        moving = self.moving(move)
        async with moving.lock:
            self.must_be_open(moving)
            must_be_at(moving, at, otherwise)
            with move_context(move=move, rank=moving.log.begin.rank, phase=phase):
                try:
                    yield moving
                except Refused as error:
                    raise _placed(late(error), moving.log) from error
                except SnapshotError as error:
                    _placed(error, moving.log)
                    raise

    @asynccontextmanager
    async def ending(self, moving: Moving, phase: str) -> AsyncIterator[None]:
        """The move, locked, with its log context, whether it has an outcome or not."""
        with move_context(move=moving.log.move, rank=moving.log.begin.rank, phase=phase):
            async with moving.lock:
                yield

    def follow(self, moving: Moving, work: Coroutine[Any, Any, None]) -> None:
        """Starts the settle loop of a move, after which nothing of the move stays in memory but a summary."""
        moving.settling = asyncio.create_task(
            self._follow(moving, work), name=f"settle {self.role} of {moving.log.move}"
        )

    async def _follow(self, moving: Moving, work: Coroutine[Any, Any, None]) -> None:
        await work
        move = moving.log.move
        async with moving.lock:  # a step may still be at work on it
            moving.forget()
            await in_thread(moving.log.fold)
            if self.moves.get(move) is moving:
                self._recalled[move] = self.moves.pop(move)  # a call that waits for its lock
        await heap.give_back()


def late(refusal: Refused) -> SnapshotError:
    """The error for a check that fails after the move has begun. It is not "Refused", which promises that nothing was paused:
    the driver undoes the move, and tries again if the rank has changed. The message of the refusal begins with the name of
    the check."""
    kind = Changed if isinstance(refusal, Changed) else Undone
    return kind(f"refused after preflight: {refusal.message}", remedy=refusal.advice, where=refusal.where)


def _placed(error: SnapshotError, move_log: MoveLog) -> SnapshotError:
    """The same error. A rank that is resumed with its job has no frozen process on a source: its image is there."""
    resumed = move_log.begin.role == "target" and move_log.begin.coordinator
    if resumed and error.where is Where.SOURCE_FROZEN:
        error.where = Where.SUSPENDED
    return error


def must_be_at(moving: Moving, at: Collection[Mark], otherwise: str = "") -> None:
    mark = moving.log.last_mark
    if at and mark not in at:
        raise WrongState(f"move {moving.log.move} is {mark}{otherwise}", where=where_of(moving.log))


async def settle_loop(
    moving: Moving,
    settle_once: Callable[[Moving], Awaitable[None]],
    first_s: float,
    again_s: float,
    what: str,
    *,
    finished: Callable[[], bool] | None = None,
    wait: Callable[[float], Awaitable[None]] | None = None,
) -> None:
    """Settles one move until it is `finished` (default: SETTLED). Waits `first_s` for the driver before the first attempt.
    Logs the reason for waiting when it changes."""
    wait = wait or moving.wait
    finished = finished or (lambda: moving.log.last_mark is Mark.SETTLED)
    with move_context(move=moving.log.move, rank=moving.log.begin.rank, phase="settle"):
        logged = ""
        await wait(first_s)
        while not finished():
            try:
                async with moving.lock:
                    await settle_once(moving)
            except SnapshotError as error:
                moving.waiting_for = error.message
            except Exception:
                log.exception("settling the %s of %s", what, moving.log.move)
            if moving.waiting_for != logged:
                logged = moving.waiting_for
                log.info("move %s: %s: %s", moving.log.move, what, logged)
            await wait(again_s)
