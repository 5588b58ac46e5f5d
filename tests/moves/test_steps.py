"""What all steps have in common: they run to their end, and a refusal after the beginning of a move is an undo."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from snapshotd.api.errors import Changed, CriuFailed, NotFound, Refused, SnapshotError, Undone, Where, WrongState
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.proc import host

MOVE, OTHER = "m-0123456789ab", "m-0123456789ac"


class Source(Steps):
    role = "source"

    def __init__(self, folder: Path) -> None:
        super().__init__(Journal(folder))
        self.done = 0
        self.go_on = asyncio.Event()

    def begun(self) -> MoveLog:
        nodes = ("a", "a:1", "b", "b:1")
        log = self.journal.begin(Begin(MOVE, "source", "job-0", "job", 0, *nodes, "00" * 32, host.boot_id(), 1.0, 30.0))
        log.mark(Mark.FREEZING)
        return log

    @step
    async def slow(self, move: str) -> int:
        async with self.working_on(move, "freeze"):
            await self.go_on.wait()
            self.done += 1
            return self.done

    @step
    async def refuse(self, move: str) -> None:
        async with self.working_on(move, "freeze"):
            raise Refused("gpu-ipc: shared", remedy="stop sharing", where=Where.SOURCE_FROZEN)

    @step
    async def find_changed(self, move: str) -> None:
        async with self.working_on(move, "freeze"):
            raise Changed("new-files: one more", where=Where.SOURCE_FROZEN)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


async def test_step_runs_to_its_end_after_its_caller_is_cancelled(source: Source) -> None:
    source.begun()
    call = asyncio.create_task(source.slow(MOVE))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    source.go_on.set()
    assert await source.slow(MOVE) == 2


async def test_refusal_in_a_begun_move_is_undone_and_names_its_check(source: Source) -> None:
    """Exit code 10 promises that nothing was paused."""
    source.begun()
    with pytest.raises(Undone, match="gpu-ipc: shared") as caught:
        await source.refuse(MOVE)
    assert (caught.value.exit_code, caught.value.where) == (11, Where.SOURCE_FROZEN)
    assert caught.value.advice == "stop sharing"


async def test_refusal_of_a_changed_rank_is_known_as_such_by_the_driver(source: Source) -> None:
    """It tries again."""
    source.begun()
    with pytest.raises(SnapshotError, match="refused after preflight: new-files: one more") as caught:
        await source.find_changed(MOVE)
    assert (caught.value.code, caught.value.where) == (Changed.code, Where.SOURCE_FROZEN)


@pytest.mark.parametrize("error", [Refused, CriuFailed])
async def test_rank_that_is_resumed_is_suspended_after_a_failure_and_not_frozen(
    tmp_path: Path, error: type[SnapshotError]
) -> None:
    steps = Steps(Journal(tmp_path))
    steps.role = "target"
    names = ("target", "job-0", "job", 0, "a", "a:1", "b", "b:1", "00" * 32, host.boot_id(), 1.0)
    for move, coordinator, where in ((MOVE, "", Where.SOURCE_FROZEN), (OTHER, "m-ba9876543210", Where.SUSPENDED)):
        steps.journal.begin(Begin(move, *names, coordinator=coordinator)).mark(Mark.SEALED)
        with pytest.raises(SnapshotError) as caught:
            async with steps.working_on(move, "restore"):
                raise error("it cannot be restored", where=Where.SOURCE_FROZEN)
        assert caught.value.where is where


async def test_step_of_a_move_that_has_ended_is_rejected(source: Source) -> None:
    source.begun().decide(Outcome.ABORT, "the lease ran out", "source")
    with pytest.raises(WrongState, match="the lease ran out"):
        await source.slow(MOVE)


async def test_step_at_the_wrong_mark_is_rejected(source: Source) -> None:
    source.begun()
    with pytest.raises(WrongState, match=f"{MOVE} is freezing, not frozen"):
        async with source.working_on(MOVE, "stream", at={Mark.FROZEN}, otherwise=", not frozen"):
            raise AssertionError("not reached")


async def test_move_of_another_role_is_not_found(source: Source) -> None:
    source.begun()
    source.role = "target"
    with pytest.raises(NotFound):
        await source.slow(MOVE)


async def test_settle_loop_continues_after_failures_until_it_is_finished(source: Source) -> None:
    moving = Moving(source.begun())
    failures: list[Exception] = [SnapshotError("no answer"), ValueError("a defect")]
    waited: list[str] = []

    async def settle_once(moving: Moving) -> None:
        if failures:
            raise failures.pop(0)
        moving.log.mark(Mark.SETTLED)

    async def wait(seconds: float) -> None:
        waited.append(moving.waiting_for)

    await settle_loop(moving, settle_once, 3.0, 1.0, "source", wait=wait)
    assert waited == ["", "no answer", "no answer", "no answer"]
