"""The history: finished moves are removed by age and count; unfinished ones, and those that a node may need, are not."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError, Unreachable
from snapshotd.moves.history import DAY_S, History, due
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.steps import Steps
from snapshotd.proc import host
from snapshotd.proc.tree import Process

NOW = 1_800_000_000.0
COORDINATOR = "m-0000000000ff"


class Daemon:
    """A daemon with one journal, and another node that may or may not answer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = Steps(Journal(folder))
        self.answer: Any = Unreachable("the other node does not answer")
        self._clock = NOW
        monkeypatch.setattr("snapshotd.moves.journal.time.time", lambda: self._clock)
        config = SimpleNamespace(history_days=30, history_moves=1000)
        suspended = SimpleNamespace(sealed=lambda move: False)
        node: Any = SimpleNamespace(config=config, client=self._client, store_of=lambda begin: suspended)
        self.node, self.history = node, History(node, [self.steps])

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> Any:
        async def answer(request: pb.MoveRequest, timeout_s: float) -> Any:
            if isinstance(self.answer, SnapshotError):
                raise self.answer
            return self.answer

        async def of_job(request: pb.MoveRequest, timeout_s: float) -> Any:
            assert (name, request.move) == ("c", COORDINATOR)
            return await answer(request, timeout_s)

        yield SimpleNamespace(
            target=SimpleNamespace(GetCopy=answer),
            source=SimpleNamespace(GetOutcome=answer),
            job=SimpleNamespace(GetOutcome=of_job),
        )

    def move(
        self,
        number: int,
        days_ago: float,
        mark: Mark = Mark.SETTLED,
        role: str = "peer",
        coordinator: tuple[str, ...] = (),
        **fields: Any,
    ) -> MoveLog:
        """A move whose last mark has the given age."""
        self._clock = NOW - days_ago * DAY_S
        nodes = ("a", "a:1", "b", "b:1")
        begin = Begin(
            *(f"m-{number:012x}", role, "job-0", "job", 0, *nodes, "00" * 32, host.boot_id(), self._clock, 0.0, -1),
            *coordinator,
        )
        move_log = self.steps.journal.begin(begin)
        move_log.mark(mark, **fields)
        self.steps.moves[move_log.move] = Moving(move_log)
        return move_log

    async def prune(self) -> list[str]:
        return await self.history.prune(NOW)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(tmp_path, monkeypatch)


async def test_finished_moves_are_removed_by_age(daemon: Daemon, tmp_path: Path) -> None:
    old, recent = daemon.move(1, 31), daemon.move(2, 29)
    assert await daemon.prune() == [old.move]
    assert daemon.steps.journal.find(old.move) is None
    assert list(daemon.steps.moves) == [recent.move]
    assert [known.move for known in Journal(tmp_path).all()] == [recent.move]
    assert os.listdir(tmp_path / "moves") == [recent.move]


async def test_finished_moves_are_removed_by_count_oldest_first(daemon: Daemon) -> None:
    daemon.node.config.history_moves = 2
    moves = [daemon.move(number, 20 - number) for number in range(5)]
    assert await daemon.prune() == [known.move for known in moves[:3]]


async def test_moves_of_the_last_day_stay_whatever_their_number(daemon: Daemon) -> None:
    daemon.node.config.history_moves = 1
    for number in range(5):
        daemon.move(number, 0.5)
    assert await daemon.prune() == []


@pytest.mark.parametrize("mark", [mark for mark in Mark if mark not in {Mark.SETTLED, Mark.DISCARDED, Mark.ACTIVATED}])
async def test_unfinished_moves_are_never_removed(daemon: Daemon, mark: Mark) -> None:
    daemon.node.config.history_moves = 1
    unfinished = daemon.move(1, 3000, mark)
    unfinished.decide(Outcome.ABORT, "", "source")
    daemon.move(2, 2000, mark)
    assert await daemon.prune() == []


async def test_unfinished_moves_do_not_count(daemon: Daemon) -> None:
    moves = [daemon.move(1, 10), daemon.move(2, 5, Mark.FROZEN), daemon.move(3, 3)]
    assert due(moves, days=30, count=2, now_unix_s=NOW) == []
    assert due(moves, days=30, count=1, now_unix_s=NOW) == [moves[0]]


async def test_target_whose_copy_still_runs_keeps_its_record(daemon: Daemon) -> None:
    """Its keeper names the move when it connects again."""
    daemon.answer = pb.Outcome(settled=True)
    me = Process.of(os.getpid())
    running = daemon.move(1, 100, Mark.ACTIVATED, "target", pid=me.pid, start_ticks=me.start_ticks)
    assert await daemon.prune() == []
    running.mark(Mark.ACTIVATED, start_ticks=1)
    assert await daemon.prune() == [running.move]


@pytest.mark.parametrize(
    ("answer", "removed"),
    [
        (pb.Outcome(kind=pb.COMMIT, settled=True), True),
        (pb.Outcome(kind=pb.COMMIT, settled=False), False),
        (NotFound("it has removed the move itself"), True),
        (Unreachable("down for a month"), False),
    ],
)
async def test_target_keeps_its_record_until_the_source_has_settled(daemon: Daemon, answer: Any, removed: bool) -> None:
    """The source asks whether the copy ran: without the record an operator could declare the target dead."""
    daemon.answer = answer
    daemon.move(1, 100, Mark.ACTIVATED, "target")
    assert bool(await daemon.prune()) == removed


@pytest.mark.parametrize(
    ("answer", "removed"),
    [
        (pb.Outcome(kind=pb.COMMIT, settled=True), True),
        (pb.Outcome(kind=pb.COMMIT, settled=False), False),
        (NotFound("it has removed the record itself"), True),
        (Unreachable("down for a month"), False),
    ],
)
@pytest.mark.parametrize(
    ("role", "mark"), [("target", Mark.ACTIVATED), ("target", Mark.DISCARDED), ("source", Mark.SETTLED)]
)
async def test_rank_of_a_job_keeps_its_record_until_the_coordinator_has_settled(
    daemon: Daemon, role: str, mark: Mark, answer: Any, removed: bool
) -> None:
    """The coordinator of a suspension or resumption asks whether it was carried out, and waits for that."""
    daemon.answer = answer
    daemon.move(1, 100, mark, role, (COORDINATOR, "c", "c:1"))
    assert bool(await daemon.prune()) == removed


@pytest.mark.parametrize(
    ("answer", "removed"),
    [
        (pb.Copy(state=pb.Copy.DISCARDED), True),
        (pb.Copy(state=pb.Copy.NO_SUCH_MOVE), True),
        (pb.Copy(state=pb.Copy.HELD), False),
        (pb.Copy(state=pb.Copy.RECEIVING), False),
        (Unreachable("down for a month"), False),
    ],
)
async def test_source_keeps_an_abort_until_the_target_has_discarded(daemon: Daemon, answer: Any, removed: bool) -> None:
    daemon.answer = answer
    daemon.move(1, 100, role="source").decide(Outcome.ABORT, "", "driver")
    assert bool(await daemon.prune()) == removed


async def test_source_that_committed_needs_no_answer(daemon: Daemon) -> None:
    daemon.move(1, 100, role="source").decide(Outcome.COMMIT, "", "driver")
    assert len(await daemon.prune()) == 1


async def test_crash_while_a_move_is_removed_leaves_no_half_move(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, recent = daemon.move(1, 31), daemon.move(2, 1.5)

    def crash(folder: Path) -> None:
        (folder / "begin.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            daemon.steps.journal.remove(old.move)
    after = Journal(tmp_path)
    assert [known.move for known in after.all()] == [recent.move]
    assert len(os.listdir(tmp_path / "moves")) == 2
    after.sweep_removed()
    assert os.listdir(tmp_path / "moves") == [recent.move]


async def test_crash_before_the_rename_leaves_the_whole_move(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = daemon.move(1, 31)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            daemon.steps.journal.remove(old.move)
    assert Journal(tmp_path).get(old.move).record == old.record
