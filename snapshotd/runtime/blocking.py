"""The one door from the event loop to threads. Nothing else in the daemon may block the loop.

Cancelling a caller waits for its thread: an abandoned thread would go on changing a rank behind everybody's back.
Work that can hang for ever (criu, the CUDA driver) does not belong in a thread but in a child that can be killed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

#: For `all_at_once`: more threads than a node has ranks. They are made when they are needed.
_side_by_side = ThreadPoolExecutor(max_workers=512, thread_name_prefix="side-by-side")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in a worker thread; a cancellation is delivered only after it has returned."""
    return await _in(None, functools.partial(function, *args, **kwargs))


async def all_at_once(function: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """The same for every item, each in a thread of its own, because they wait for each other: the workers of `in_thread` are
    so few that the last would wait for the first. All are waited for, then the first failure is raised."""
    running = [_in(_side_by_side, functools.partial(function, item)) for item in items]
    results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _in(executor: Executor | None, function: Callable[[], T]) -> T:
    future = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
