"""The network process gives memory back while it serves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from snapshotd.network import server
from tests.served import Serve


async def test_freed_memory_is_given_back_again_and_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    given = threading.Semaphore(0)
    monkeypatch.setattr(server, "GIVE_BACK_S", 0.01)
    monkeypatch.setattr("snapshotd.runtime.heap._trim", given.release)
    async with serve(lambda services: None):
        for _ in range(2):
            assert await asyncio.to_thread(given.acquire, timeout=60)
