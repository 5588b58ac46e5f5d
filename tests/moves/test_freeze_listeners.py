"""New connections to a rank are admitted again, also if it closed its listener while it was being frozen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.peers import connections, new_connections
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import freeze
from snapshotd.net import filter as packets
from tests.moves.test_ended import begun


@pytest.mark.parametrize("held", [False, True])
async def test_filter_at_a_listener_that_was_closed_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    async def drain(_move: str) -> Any:
        return SimpleNamespace(to_json=dict)

    dropped: list[str] = []
    monkeypatch.setattr(connections, "frozen", lambda *_: ([], []))  # the frozen rank has no socket any more
    monkeypatch.setattr(packets, "drop_table", dropped.append)
    moving = Moving(begun(Journal(tmp_path)))
    moving.log.mark(Mark.FREEZING, filtered=True, new_connections_held=True)
    entry: Any = SimpleNamespace(group=SimpleNamespace(pids=list))
    link: Any = SimpleNamespace(drain=drain)
    places: Any = None
    await freeze._silence(moving, entry, link, places, held=held)
    new_connections.admit(moving.log)
    assert dropped == ([new_connections.table(moving.log.move)] if held else [])
