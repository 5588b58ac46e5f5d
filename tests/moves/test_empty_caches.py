"""Free blocks of torch's allocators are given back before the freeze: once more if that has worked. Idle compilers end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.inprocess.shimctl import Emptied
from snapshotd.moves.device import cuda_processes, memory
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.moving import Moving
from snapshotd.moves.source import freeze
from snapshotd.proc import host
from snapshotd.proc.tree import Process

MOVE = "m-0123456789ab"


@pytest.mark.parametrize(
    ("answers", "asked", "given_back"),
    [
        ([None, 5], 1, 0),  # its interpreter reached no safe point in time
        ([0, 5], 2, 5),
        ([7, 5], 2, 7),
        ([7, None], 2, 7),
    ],
)
def test_process_that_does_not_answer_in_time_is_asked_once(
    answers: list[int | None], asked: int, given_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(answers)

    async def must_find(*_given: Any) -> list[Process]:
        return [Process(7, 1)]

    async def prepare(_node: Any, moving: Moving, *_given: Any) -> None:
        moving.offload = SimpleNamespace()  # type: ignore[assignment]

    monkeypatch.setattr(cuda_processes, "must_find", must_find)
    monkeypatch.setattr(freeze, "_prepare", prepare)
    monkeypatch.setattr(memory, "_empty_cache", lambda _process: Emptied(left.pop(0)))
    node: Any = SimpleNamespace(gpus=None, caches_left={})
    log: Any = SimpleNamespace(move=MOVE)
    entry: Any = SimpleNamespace(group=SimpleNamespace(pids=lambda: [7]))
    asyncio.run(freeze.make_ready(node, Moving(log), entry, Parts()))
    assert len(answers) - len(left) == asked
    assert node.caches_left == {MOVE: given_back}


def test_compilers_are_waited_for_as_long_as_some_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends after the other, with a tenth of a second in between; once another program begins just then."""
    listed = [*[[7, 8, 9, 10]] * 10, *[[7, 8, 9, 20]] * 10, [7, 8, 20], [7, 8]]
    seen: list[list[int]] = []
    told: list[Process] = []
    now_s = 0.0

    async def must_find(_gpus: Any, pids: list[int]) -> list[Process]:
        seen.append(pids)
        return [Process(7, 1)]

    async def prepare(*_given: Any) -> None:
        pass

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def pids() -> list[int]:
        return listed.pop(0) if told and len(listed) > 1 else listed[0]

    def empty_cache(process: Process) -> Emptied:
        told.append(process)
        return Emptied(None, 1)

    monkeypatch.setattr(cuda_processes, "must_find", must_find)
    monkeypatch.setattr(freeze, "_prepare", prepare)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(host, "boottime_s", lambda: now_s)
    monkeypatch.setattr(memory, "_empty_cache", empty_cache)
    node: Any = SimpleNamespace(gpus=None, caches_left={})
    entry: Any = SimpleNamespace(group=SimpleNamespace(pids=pids))
    move_log: Any = SimpleNamespace(move=MOVE)
    asyncio.run(freeze.make_ready(node, Moving(move_log), entry, Parts()))
    assert seen == [[7, 8, 9, 10], [7, 8]]
