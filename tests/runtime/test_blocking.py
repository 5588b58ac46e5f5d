"""Threads: what strangers cause never takes those of moves, and one stranger never takes all of a lane."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from snapshotd.runtime import blocking
from snapshotd.runtime.blocking import Lane, in_thread


@asynccontextmanager
async def flooded(lane: Lane, key: str, count: int) -> AsyncIterator[list[int]]:
    """`count` tasks with this key, each of which would keep a thread until the end. Yields what runs."""
    let_end, running = threading.Event(), [0]

    def work() -> None:
        running[0] += 1
        let_end.wait(60)

    async def one() -> None:
        async with lane.turn(key):
            await in_thread(work)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        while not running[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield running
    finally:
        let_end.set()
        await asyncio.gather(*tasks)


async def test_work_of_a_stranger_takes_no_threads_of_moves_or_of_other_strangers() -> None:
    lane = Lane("test", threads=8, each=2)
    async with flooded(lane, "alice", 200) as running:
        assert await asyncio.wait_for(in_thread(lambda: "a move"), 30) == "a move"
        async with lane.turn("bob"):
            name = await asyncio.wait_for(in_thread(lambda: threading.current_thread().name), 30)
        assert name.startswith("test")
        assert running[0] <= 2
    assert lane._turns == {}


async def test_cancelled_wait_for_a_turn_leaves_nothing() -> None:
    lane = Lane("test", threads=8, each=1)
    async with flooded(lane, "alice", 1):
        waiting = asyncio.create_task(_turn(lane))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert lane._turns == {}
    await _turn(lane)


async def _turn(lane: Lane) -> None:
    async with lane.turn("alice"):
        pass


async def test_threads_of_moves_are_used_again_after_a_turn() -> None:
    lane = Lane("test", threads=1, each=1)
    await _turn(lane)
    assert not (await in_thread(lambda: threading.current_thread().name)).startswith("test")


async def test_failure_that_a_cancelled_caller_does_not_learn_is_not_reported_by_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, let_fail = threading.Event(), threading.Event()

    def fail() -> None:
        entered.set()
        let_fail.wait(60)
        raise ValueError("a bad address")

    task = asyncio.create_task(in_thread(fail))
    while not entered.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    let_fail.set()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_the_daemon_uses_threads_of_the_event_loop_in_one_file_only() -> None:
    """Elsewhere a cancellation would abandon the thread, and log records in it would not carry the move."""
    daemon = Path(blocking.__file__).parents[1]
    pattern = re.compile(r"\b(to_thread|run_in_executor)\(")
    found = [path for path in daemon.rglob("*.py") if pattern.search(path.read_text())]
    assert found == [Path(blocking.__file__)]
