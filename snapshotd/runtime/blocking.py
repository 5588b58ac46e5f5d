"""The only way from the event loop to threads. Nothing else in the daemon may block the loop.

Moves use the threads of the event loop. What users and other callers can cause as often as they like runs in threads of its
own (`Lane`), and so does what waits for a disk that stores images (`waiting_for_disk`), so that moves never wait for it.

Cancelling a caller waits for its thread, because an abandoned thread would keep changing the rank unnoticed. Work that can
hang for ever (criu, the CUDA driver) belongs in a child process, which can be killed, not in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec, TypeVar, cast

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

#: For `all_at_once` and `in_own_thread`: more threads than a node has ranks. They are started on demand.
_side_by_side = ThreadPoolExecutor(max_workers=512, thread_name_prefix="side-by-side")


_executor: contextvars.ContextVar[Executor | None] = contextvars.ContextVar("executor", default=None)


class Lane:
    """Threads apart from those of moves, for one kind of work that others can cause. Each of them gets `each` at a time."""

    def __init__(self, name: str, threads: int, each: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._each = each
        self._turns: dict[Hashable, tuple[asyncio.Semaphore, set[object]]] = {}  # and what uses or awaits it

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Waits until less than `each` others with this key are inside. Inside, `in_thread` uses the threads of this lane."""
        semaphore, users = self._turns.setdefault(key, (asyncio.Semaphore(self._each), set()))
        users.add(user := object())
        try:
            async with semaphore:
                token = _executor.set(self._threads)
                try:
                    yield
                finally:
                    _executor.reset(token)
        finally:
            users.discard(user)
            if not users:
                self._turns.pop(key, None)


#: What local users cause by their keepers, by user: hellos, and ends of ranks, whose processes may take long to die.
USERS = Lane("users", threads=32, each=4)
#: Questions about this node, by caller. On a node with a sick GPU each takes seconds, and a driver of many moves asks often.
QUERIES = Lane("queries", threads=128, each=32)


#: More than all images on a disk use that are written or read at the same time. They are started on demand.
_of_disk = ThreadPoolExecutor(max_workers=512, thread_name_prefix="disk")


@contextmanager
def waiting_for_disk() -> Iterator[None]:
    """Inside, and in tasks that are begun inside, `in_thread` uses threads apart from those of moves: a disk that is slow, or
    does not answer, keeps them, and nothing else waits for it."""
    token = _executor.set(_of_disk)
    try:
        yield
    finally:
        _executor.reset(token)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `function(*args, **kwargs)` in a worker thread. A cancellation is delivered only after it has returned."""
    return await _in(_executor.get(), functools.partial(function, *args, **kwargs))


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for what may wait for seconds: it does not keep a worker from others meanwhile."""
    return await _in(_side_by_side, functools.partial(function, *args, **kwargs))


async def all_at_once(function: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Runs `function` for every item at the same time, each in a separate thread, for calls that wait for each other.

    With the few workers of `in_thread` the last call would wait for the first, which waits for the last. Waits for all,
    then raises the first failure.
    """
    running = [_in(_side_by_side, functools.partial(function, item)) for item in items]
    results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class Reader:
    """Runs functions that only read, in threads that can be abandoned.

    For what can hang in the kernel (counters of sick hardware): such a read can neither be ended nor awaited, not even when
    the daemon exits. As long as one hangs, no other is begun. Nothing may depend on what an abandoned thread does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def run(self, function: Callable[[], T], limit_s: float) -> T:
        """The result, or TimeoutError."""
        if self._busy:
            raise TimeoutError(f"{self._name}: the last read has not returned yet")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, result))

        def work() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                failure = error
            self._busy = False
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, failure)

        self._busy = True
        threading.Thread(target=work, name=self._name, daemon=True).start()
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError as error:
            raise TimeoutError(f"{self._name}: not read within {limit_s:g} s") from error


async def _in(executor: Executor | None, function: Callable[[], T]) -> T:
    # In the caller's context, so that records logged in the thread carry the move (snapshotd/runtime/logs.py).
    future = asyncio.get_running_loop().run_in_executor(executor, contextvars.copy_context().run, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled() and (error := future.exception()) is not None:
            log.debug("a cancelled caller does not learn: %s", error)
        raise
