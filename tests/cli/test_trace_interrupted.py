"""Tests that collecting the spans of a move, with `migrator move --trace`, never changes what is reported about the move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from migrator.cluster import Cluster
from migrator.driver import Driver, trace
from migrator.driver.trace import Trace
from migrator.protocol import Verdict
from migrator.results import Event, MoveOptions, MoveResult
from snapshotd.api.errors import Changed, SnapshotError, Where
from tests.cli.conftest import a_rank
from tests.cli.fake_daemon import FakeCluster

CHANGED = Changed("devices: the rank has opened /dev/kmsg", remedy="close it", where=Where.SOURCE_FROZEN)


class Hears(dict[str, SnapshotError]):
    """The failures of a daemon. When a method is called for the `nth` time, something happens first."""

    def __init__(self, method: str, nth: int, then: Callable[[], object], **failures: SnapshotError) -> None:
        super().__init__(failures)
        self.method, self.left, self.then = method, nth, then

    def get(self, method: str, default: Any = None) -> Any:
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                self.then()
        return super().get(method, default)


class Moved:
    """A move with a trace, which can be interrupted as Ctrl-C does it, from any thread."""

    def __init__(self, cluster: FakeCluster) -> None:
        cluster["node-1"].ranks = [a_rank("node-1")]
        self.trace = Trace()
        self.notes: list[Event] = []
        self.driver = Driver(Cluster.load(cluster.path), self.notes.append, self.trace)
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[MoveResult] | None = None

    def interrupt(self) -> None:
        assert self.task is not None
        self.loop.call_soon_threadsafe(self.task.cancel)

    async def result(self) -> MoveResult:
        self.task = asyncio.create_task(self.driver.move(MoveOptions(0, "spare-1")))
        async with asyncio.timeout(60):
            return await self.task


async def test_interrupt_after_the_rank_has_moved_is_reported_as_moved(cluster: FakeCluster) -> None:
    move = Moved(cluster)
    cluster["spare-1"].failures = Hears("GetSpans", 1, move.interrupt)
    result = await move.result()
    assert (result.outcome, result.where, result.exit_code) == (Verdict.MOVED, Where.TARGET_RUNNING, 0)
    assert cluster["spare-1"].called("Activate", "Discard") == ["Activate"]


async def test_interrupt_after_a_second_attempt_has_moved_the_rank_is_reported_as_moved(cluster: FakeCluster) -> None:
    move = Moved(cluster)
    source = cluster["node-1"]
    source.failures = Hears("Stream", 2, lambda: source.failures.pop("Stream"), Stream=CHANGED)
    cluster["spare-1"].failures = Hears("GetSpans", 2, move.interrupt)
    result = await move.result()
    assert (result.outcome, result.where, result.attempts) == (Verdict.MOVED, Where.TARGET_RUNNING, 2)


async def test_interrupt_after_an_undone_attempt_is_followed_by_no_other_attempt(cluster: FakeCluster) -> None:
    move = Moved(cluster)
    cluster["node-1"].failures["Stream"] = CHANGED
    cluster["spare-1"].failures = Hears("GetSpans", 1, move.interrupt)
    result = await move.result()
    assert (result.outcome, result.where) == (Verdict.UNDONE, Where.SOURCE_RUNNING)
    assert cluster["node-1"].called("Begin") == ["Begin"]


async def test_move_is_reported_although_its_spans_cannot_be_collected(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("no such clock")

    monkeypatch.setattr(trace, "ask_all", broken)
    move = Moved(cluster)
    assert (await move.result()).outcome is Verdict.MOVED
    assert move.trace.missing["spare-1"] == "the spans were not collected: ValueError: no such clock"


async def test_nodes_that_are_asked_for_spans_do_not_delay_the_result_without_a_limit(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(trace, "ask_all", silent)
    monkeypatch.setattr(trace, "COLLECT_S", 0.01)
    move = Moved(cluster)
    assert (await move.result()).outcome is Verdict.MOVED
    assert "not all nodes answered" in move.trace.missing["node-1"]
