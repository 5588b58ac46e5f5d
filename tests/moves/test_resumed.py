"""What the target of a resumption refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.api.errors import Busy
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.target import resumed


def test_rank_is_not_resumed_while_an_earlier_attempt_is_not_cleaned_up(tmp_path: Path) -> None:
    """Both copies would use the same cgroup and registry entry."""
    names = ("m-000000000001", "target", "night-0", "night", 0, "a", "a:1", "b", "b:1", "00" * 32, "boot", 1.0)
    older = Moving(Journal(tmp_path).begin(Begin(*names, coordinator="m-ba9876543210")))
    resumed.must_be_first([older], "night-1")
    with pytest.raises(Busy, match="m-000000000001 of this rank to here is not cleaned up yet"):
        resumed.must_be_first([older], "night-0")
    older.done = True
    resumed.must_be_first([older], "night-0")
