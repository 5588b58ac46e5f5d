"""How the settle loop of a move waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.moves.moving import Moving


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_at_the_moment_of_an_event_is_not_forgotten(turns: int) -> None:
    """A daemon that ends would wait for its settle loop for ever."""
    moving: Any = SimpleNamespace(changed=asyncio.Event())

    async def settle() -> None:
        while True:
            await Moving.wait(moving, 600)

    settling = asyncio.create_task(settle())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    moving.changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    settling.cancel()
    done, _ = await asyncio.wait([settling], timeout=60)
    if not done:
        settling.cancel()
    assert done
