"""The only way from the event loop to threads. Nothing else in the daemon may block the loop.

Cancelling a caller waits for its thread, because an abandoned thread would keep changing the rank unnoticed. Work that can
hang for ever (criu, the CUDA driver) belongs in a child process, which can be killed, not in a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

#: For `all_at_once`: more threads than a node has ranks. They are started on demand.
_side_by_side = ThreadPoolExecutor(max_workers=512, thread_name_prefix="side-by-side")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `function(*args, **kwargs)` in a worker thread. A cancellation is delivered only after it has returned."""
    return await _in(None, functools.partial(function, *args, **kwargs))


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


async def _in(executor: Executor | None, function: Callable[[], T]) -> T:
    # In the caller's context, so that records logged in the thread carry the move (snapshotd/runtime/logs.py).
    future = asyncio.get_running_loop().run_in_executor(executor, contextvars.copy_context().run, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
