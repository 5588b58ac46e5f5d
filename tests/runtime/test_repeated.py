"""A look that fails does not end the ones after it."""

from __future__ import annotations

import asyncio

import pytest

from snapshotd.runtime.repeated import Repeated


async def test_a_look_that_fails_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    again = asyncio.Event()
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("not now")
        again.set()

    repeated = Repeated("a look", look, 0.01)
    repeated.start()
    await asyncio.wait_for(again.wait(), 60)
    await repeated.stop()
    seen = looks
    assert "a look: this look failed" in caplog.text
    await asyncio.sleep(0.05)
    assert looks == seen


async def test_stopping_what_was_not_started_does_nothing() -> None:
    async def look() -> None: ...

    await Repeated("a look", look, 0.01).stop()
