"""A move is undone when memory runs short while it is in progress: the last one first, and one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Full
from snapshotd.moves import memory_watch
from snapshotd.moves.journal import Journal
from snapshotd.moves.memory_watch import MemoryWatch, shortage, wait_s
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.target import short_of_memory
from snapshotd.proc import host
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES

GIB, MIB = 1 << 30, 1 << 20


def test_short_memory_has_a_reason_with_the_arithmetic() -> None:
    assert shortage("this node", 4 * GIB, 99) == ""
    assert shortage("this node", RESERVE_BYTES, 0) == ""
    assert "cgroup /x has 12 MiB left, less than the 128 MiB that must stay free" in shortage("cgroup /x", 12 * MIB, 0)
    assert "waited for memory 45 %" in shortage("this node", RESERVE_BYTES, 45.2)


def test_memory_cannot_be_used_up_between_two_looks() -> None:
    assert wait_s(1 << 40) == 0.5
    assert wait_s(GIB + FLOOR_BYTES) == pytest.approx(0.125)
    assert wait_s(0) == 0.02


class Watched:
    """A daemon with moves on both sides, and memory that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.left_bytes = 64 * GIB
        self.undone: list[tuple[str, str]] = []
        self.journal = Journal(folder)
        room: Any = SimpleNamespace(left=lambda: ("this node", self.left_bytes), state=lambda: None)
        source: Any = SimpleNamespace(moves={}, abort=self._abort)
        self.refused: list[tuple[str, str]] = []
        self.failed: list[tuple[str, Full]] = []
        store = SimpleNamespace(refuse=lambda *told: self.refused.append(told))
        channels = SimpleNamespace(fail=lambda *told: self.failed.append(told))
        target: Any = SimpleNamespace(moves={}, node=SimpleNamespace(store=store), device_channels=channels)
        self.source, self.target = source, target
        self.watch = MemoryWatch(room, source, target)

    def move(self, number: int, role: str) -> Moving:
        name = f"m-{number:012d}"
        ends = ("a", "a:1", "b", "b:1", "00" * 32, host.boot_id())
        log = self.journal.begin(Begin(name, role, f"job-{number}", "job", 0, *ends, float(number), lease_s=30.0))
        log.mark(Mark.BEGUN if role == "source" else Mark.PREPARED)
        moving = Moving(log)
        (self.source if role == "source" else self.target).moves[name] = moving
        return moving

    async def _abort(self, move: str, reason: str, by: str) -> None:
        self.undone.append((move, reason))

    async def look(self) -> list[str]:
        """The moves that were undone so far."""
        await self.watch.look()
        await asyncio.gather(*self.watch._work)
        return [move for move, _ in (*self.undone, *self.refused)]


async def test_last_move_is_undone_first_and_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path)
    first, second, third = (watched.move(number, "source") for number in (1, 2, 3))
    third.log.decide(Outcome.COMMIT, "it is over", "driver")
    assert await watched.look() == []
    watched.left_bytes = FLOOR_BYTES - 1
    assert await watched.look() == [second.log.move]
    assert await watched.look() == [second.log.move], "one at a time"
    assert "128 MiB left" in watched.undone[0][1]
    second.log.decide(Outcome.ABORT, "undone", "source")
    second.log.mark(Mark.SETTLED)
    assert await watched.look() == [second.log.move, first.log.move]
    monkeypatch.setattr(memory_watch, "AGAIN_S", 0.0)
    assert await watched.look() == [second.log.move, first.log.move], "no move is undone twice"


async def test_target_ends_a_restore_for_lack_of_memory(tmp_path: Path) -> None:
    """The restore ends with the reason, and nothing more is received."""
    watched = Watched(tmp_path)
    moving = watched.move(1, "target")
    moving.restoring = asyncio.create_task(asyncio.sleep(600))
    restoring = asyncio.create_task(short_of_memory.unless(moving))
    await asyncio.sleep(0)
    watched.left_bytes = 0
    assert await watched.look() == [moving.log.move]
    with pytest.raises(Full, match="memory has run out during the move: this node has 0 MiB left"):
        await restoring
    assert [(move, error.message) for move, error in watched.failed] == watched.refused
    assert moving.restoring.cancelled()


async def test_restore_that_begins_after_memory_ran_out_ends_at_once(tmp_path: Path) -> None:
    moving = Watched(tmp_path).move(1, "target")
    moving.short_of_memory = "memory has run out"
    moving.restoring = asyncio.create_task(asyncio.sleep(600))
    with pytest.raises(Full, match="memory has run out"):
        await short_of_memory.unless(moving)
