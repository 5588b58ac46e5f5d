"""The one door from the event loop to threads. Nothing else in the daemon may block the loop.

Cancelling a caller waits for its thread: an abandoned thread would go on changing a rank behind everybody's back.
Work that can hang for ever (criu, the CUDA driver) does not belong in a thread but in a child that can be killed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in a worker thread; a cancellation is delivered only after it has returned."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, functools.partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
