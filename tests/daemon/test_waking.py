"""When a copy that was activated is woken, and how the daemon continues if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone, Timeout, Where
from snapshotd.inprocess import shimctl
from snapshotd.keepers import adoption
from snapshotd.keepers.adoption import Adoption
from snapshotd.moves import rules
from snapshotd.moves.device import standstill
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.target import settling
from snapshotd.moves.target.gpus import with_reservations
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.proc import host
from snapshotd.proc.tree import Process

MOVE, LATER, NONCE, GROUP = "m-0123456789ab", "m-ba9876543210", "ab" * 32, "/none/copy"


def begun(journal: Journal, move: str, role: str, rank_uid: str = "job-0") -> MoveLog:
    ends = ("a", "a:1", "b", "b:1")
    return journal.begin(Begin(move, role, rank_uid, "job", 0, *ends, NONCE, host.boot_id(), 1.0, 30.0))


class Here:
    """A node with one copy, which is this process. Records the moves that wake it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = Journal(folder)
        self.woken: list[str] = []
        self.failing: Exception | None = None
        self.entry: Any = SimpleNamespace(
            uid="job-0", cgroup=GROUP, moving="", keeper_alive=lambda: True, link=None, group=None
        )
        ranks = SimpleNamespace(
            get=lambda uid, role: self.entry, all=lambda: [self.entry], has_ended=lambda entry: False
        )
        node: Any = SimpleNamespace(
            config=SimpleNamespace(advertise="b:1", listen="b:1", data_addresses=(), image_dir=folder / "images"),
            journal=self.journal,
            ranks=ranks,
            store=SimpleNamespace(drop_soon=lambda move: None, threads=lambda move: contextlib.nullcontext()),
            credentials=None,
            holder=SimpleNamespace(drop=lambda keys: None, leave=lambda user: None, kept=dict),
        )
        monkeypatch.setattr(settling, "BulkReceivers", lambda *arguments: SimpleNamespace())
        monkeypatch.setattr(settling, "wake", self.wake)
        monkeypatch.setattr(adoption, "wake", self.wake)
        monkeypatch.setattr(adoption, "asleep", lambda move_log, group: True)
        anything: Any = SimpleNamespace(publish=lambda entry, left: None)
        self.target = TargetSteps(node, anything, anything)
        self.source = SourceSteps(node, lambda pids: "", anything)
        self.adoption = Adoption(node, self.source, self.target, anything, anything)

    async def wake(self, move_log: MoveLog) -> None:
        if self.failing is not None:
            raise self.failing
        self.woken.append(move_log.move)

    def held(self) -> MoveLog:
        me = Process.of(os.getpid())
        move_log = begun(self.journal, MOVE, "target")
        move_log.mark(Mark.HELD, pid=me.pid, start_ticks=me.start_ticks, cgroup=GROUP)
        return move_log

    def activated(self) -> MoveLog:
        move_log = self.held()
        move_log.decide(Outcome.COMMIT, "", "source")
        move_log.mark(Mark.ACTIVATED)
        return move_log


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Here]:
    made = Here(tmp_path, monkeypatch)
    yield made
    await made.adoption.stop()


TOKEN = rules.proof(bytes.fromhex(NONCE), "COMMIT", MOVE)


async def test_token_wakes_the_copy_once(here: Here) -> None:
    here.held()
    here.entry.moving = MOVE
    assert (await here.target.activate(MOVE, TOKEN)).running
    assert (await here.target.activate(MOVE, TOKEN)).running
    assert (here.woken, here.entry.moving) == ([MOVE], "")


async def test_activate_of_a_move_activated_before_a_restart_wakes_nothing(here: Here) -> None:
    here.activated()
    assert (await here.target.activate(MOVE, TOKEN)).running
    assert here.woken == []


@pytest.mark.parametrize("change", [{"moving": LATER}, {"cgroup": "/none/other"}])
async def test_copy_of_another_move_is_not_woken(here: Here, change: dict[str, str]) -> None:
    here.held()
    vars(here.entry).update(change)
    await here.target.activate(MOVE, TOKEN)
    assert here.woken == []
    assert here.entry.moving == change.get("moving", "")


async def test_unregistered_copy_is_not_woken(here: Here) -> None:
    here.held()
    here.entry = None
    await here.target.activate(MOVE, TOKEN)
    assert here.woken == []


async def test_copy_that_cannot_be_woken_at_start_is_woken_later(here: Here) -> None:
    here.activated()
    here.failing = Timeout("threads were let go and have not gone on yet")
    await here.adoption.sweep()
    assert here.entry.moving == MOVE, "another move could begin with it half awake"
    settling = here.target.moves[MOVE].settling
    assert settling is not None
    here.failing = None
    here.target.moves[MOVE].wake()
    await settling
    assert (here.woken, here.entry.moving) == ([MOVE], "")


@pytest.mark.parametrize("failure", [None, Timeout("no answer")])
async def test_restore_is_forgotten_when_it_is_done(
    here: Here, monkeypatch: pytest.MonkeyPatch, failure: Timeout | None
) -> None:
    """It has the connection of the copy's keeper."""

    async def nothing(*arguments: Any) -> None:
        pass

    async def run(*arguments: Any) -> dict[str, Any]:
        assert MOVE in here.target.restores, "the keeper could not be matched with its restore"
        if failure is not None:
            raise failure
        return {}

    made: Any = SimpleNamespace(run=run, sweep=nothing)
    monkeypatch.setattr("snapshotd.moves.target.steps.Restore", lambda node, move_log: made)
    forwarding: Any = SimpleNamespace(make_room=nothing)
    here.target.forwarding = forwarding
    begun(here.journal, MOVE, "target").mark(Mark.SEALED)
    with pytest.raises(Timeout) if failure else contextlib.nullcontext():
        await here.target.restore(MOVE)
    assert here.target.restores == {}


def test_move_without_a_mark_is_aborted_at_start(here: Here) -> None:
    move_log = begun(here.journal, LATER, "source")
    here.source.adopt_journal()
    assert move_log.outcome is not None
    assert (move_log.outcome.outcome, move_log.last_mark) == (Outcome.ABORT, Mark.SETTLED)
    assert (move_log.folder / "marks").read_text().count("\n") == 1
    assert here.source.moves == {}


async def test_outcome_of_a_move_without_a_mark_reports_the_rank_running(here: Here) -> None:
    begun(here.journal, LATER, "source")
    here.source.adopt_journal()
    result = await here.source.outcome(LATER)
    assert (result.kind, result.where, result.settled) == (pb.ABORT, Where.SOURCE_RUNNING.value, True)


async def test_ended_child_does_not_keep_the_others_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    living, dead = Process(10, 1), Process(11, 1)

    def find(process: Process) -> Any:
        if process == dead:
            raise RankGone("process 11 has ended")
        return SimpleNamespace(
            state=lambda: SimpleNamespace(parked=True, device_offloaded=False, shared_closed=False),
            release=lambda timeout_s: released.append(process),
        )

    monkeypatch.setattr(shimctl, "find", find)
    await standstill.let_go([dead, living])
    assert released == [living]


def test_gpu_of_a_leaving_rank_is_reserved(here: Here) -> None:
    found = [pb.Gpu(uuid="GPU-a"), pb.Gpu(uuid="GPU-b")]
    leaving = begun(here.journal, LATER, "source")
    leaving.mark(Mark.FREEZING, gpu_uses={"GPU-b": 1})
    assert [each.reserved_for for each in with_reservations(here.journal, found)] == ["", LATER]
    leaving.mark(Mark.SETTLED)
    assert [each.reserved_for for each in with_reservations(here.journal, found)] == ["", ""]


async def test_keeper_killed_before_it_reconnects_is_noticed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank ends with it, and no link closes that would report it."""
    lost = asyncio.Event()

    async def note(entry: Any) -> None:
        lost.set()

    monkeypatch.setattr(adoption, "CHECK_AGAIN_S", 0.001)
    monkeypatch.setattr(here.adoption, "lost", note)
    here.entry.role, here.entry.away_node = "home", ""
    await here.adoption.sweep()
    await asyncio.sleep(0.01)
    assert not lost.is_set()
    here.entry.keeper_alive = lambda: False
    async with asyncio.timeout(60):
        await lost.wait()
