"""Ends what the target does for a move when this node's memory runs out.

Invariant: nothing more of the move is received, and a restore in progress ends. The source has the rank; it learns the reason
from the next answer, and undoes the move.
"""

from __future__ import annotations

import asyncio
from typing import Any

from snapshotd.api.errors import Full, Where
from snapshotd.moves.moving import Moving
from snapshotd.moves.target.settling import TargetSettling
from snapshotd.runtime.blocking import in_thread


async def stop(target: TargetSettling, moving: Moving, why: str) -> None:
    moving.short_of_memory = why
    await in_thread(target.node.store.refuse, moving.log.move, why)
    target.device_channels.fail(moving.log.move, Full(why))
    if moving.restoring is not None:
        moving.restoring.cancel()


async def unless(moving: Moving) -> Any:
    """The result of the restore in progress. Raises Full when this node's memory ran out before it ended."""
    assert moving.restoring is not None
    if moving.short_of_memory:
        moving.restoring.cancel()
    try:
        return await moving.restoring
    except asyncio.CancelledError:
        if moving.short_of_memory:
            raise Full(moving.short_of_memory, where=Where.SOURCE_FROZEN) from None
        moving.restoring.cancel()
        await asyncio.gather(moving.restoring, return_exceptions=True)
        raise
