"""Asks all nodes that have members of a communicator at once, and reports the failure that caused the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from snapshotd.api.errors import SnapshotError
from snapshotd.moves.nccl.members import cause

#: Between two messages to a node that has not given up yet.
TELL_AGAIN_S = 0.5


async def on_all(
    names: Sequence[str],
    act: Callable[[str], Coroutine[Any, Any, None]],
    give_up: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Does the same on all nodes at once. Waits for all, then raises the first failure.

    `give_up` is for calls that wait for each other: once a node has failed, it is sent to the others, repeatedly, because
    the request itself may reach a node after the first GiveUp.
    """
    tasks = {asyncio.create_task(act(name)): name for name in names}
    failed: dict[str, BaseException] = {}
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=TELL_AGAIN_S if failed and give_up else None, return_when=asyncio.FIRST_COMPLETED
            )
            failed |= {tasks[task]: error for task in done if (error := task.exception())}
            if failed and give_up and waiting:
                await asyncio.gather(*(give_up(tasks[task]) for task in waiting))
    finally:
        for task in waiting:
            task.cancel()
    if not failed:
        return
    error = cause(failed.values())
    name = next(name for name, each in failed.items() if each is error)
    if isinstance(error, SnapshotError):
        raise type(error)(f"on {name}: {error.message}", remedy=error.advice, where=error.where) from error
    raise error
