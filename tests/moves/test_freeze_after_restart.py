"""A daemon that was restarted between preflight and freeze does not know what preflight found: the move is undone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Undone, Where
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.source import freeze
from tests.moves.test_ended import begun


async def test_freeze_without_the_result_of_preflight_stops_nothing(tmp_path: Path) -> None:
    entry: Any = SimpleNamespace(group=SimpleNamespace(pids=list), link=SimpleNamespace())
    nothing: Any = None
    with pytest.raises(Undone, match="was restarted after it had checked the rank") as undone:
        await freeze.freeze(nothing, Moving(begun(Journal(tmp_path))), entry, nothing, lambda pids: "")
    assert undone.value.where is Where.SOURCE_RUNNING
