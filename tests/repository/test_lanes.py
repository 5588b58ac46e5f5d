"""A skip is a failure where the lane has what the test needs."""

from __future__ import annotations

import pytest

from tests.lanes import must_run


@pytest.mark.parametrize(
    ("lane", "reason", "fails"),
    [
        ("", "no CRIU of our own: run `make setup`", False),
        ("ci", "no CRIU of our own: run `make setup`", True),
        ("ci", "Skipped: no NVIDIA GPU on this machine", False),
        ("gpu", "Skipped: no NVIDIA GPU on this machine", True),
        ("gpu", "triton does not run here", True),
    ],
)
def test_a_lane_runs_what_it_can(monkeypatch: pytest.MonkeyPatch, lane: str, reason: str, fails: bool) -> None:
    monkeypatch.setenv("SNAPSHOT_LANE", lane)
    assert bool(must_run(reason)) is fails
