"""A daemon that stops undoes the suspension of a job whose record it has before it undoes its own part of it: a rank with a
whole image is thawed only if the record says so. Other nodes have time to learn it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves import stopping
from snapshotd.moves.rules import Mark
from tests.moves.test_coordinator import RECORD, Daemon, suspension


async def test_records_of_jobs_are_undone_before_ranks_and_other_nodes_learn_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "LEARN_S", 60.0)
    daemon = Daemon(tmp_path)
    await daemon.steps.begin(suspension())
    daemon.stored = {part.move: pb.Outcome(stored=True) for part in suspension().participants}
    seen = []

    async def abort(move: str, reason: str, by: str) -> None:
        """A rank here whose image is whole."""
        seen.append((await daemon.steps.outcome(RECORD)).kind)

        async def others_learn_it() -> None:
            await asyncio.sleep(0.2)
            daemon.stored = {one: pb.Outcome(kind=pb.ABORT, settled=True) for one in daemon.stored}

        tasks.append(asyncio.create_task(others_learn_it()))

    tasks: list[asyncio.Task[None]] = []
    open_move = SimpleNamespace(log=SimpleNamespace(move="m-000000000010", outcome=None))
    source: Any = SimpleNamespace(moves={"m-000000000010": open_move}, abort=abort)
    await stopping.undo_all(source, daemon.steps)
    assert seen == [pb.ABORT]
    assert daemon.journal.get(RECORD).last_mark is Mark.SETTLED
    await asyncio.gather(*tasks)
    await daemon.stop()
