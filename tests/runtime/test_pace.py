"""A caller that is too fast waits, and others do not."""

from __future__ import annotations

import pytest

from snapshotd.runtime.pace import Pace


def test_burst_passes_at_once_and_a_flood_is_slowed_to_the_rate() -> None:
    pace = Pace(cost_per_s=5_000, burst_cost=20_000)
    assert [pace.wait_s("a", 10, 0.0) for _ in range(2000)] == pytest.approx([0.0] * 2000)
    assert pace.wait_s("a", 5_000, 0.0) == pytest.approx(1)
    assert pace.wait_s("b", 10, 0.0) == 0.0, "another caller"
    assert pace.wait_s("a", 0, 5.0) == 0.0, "it has waited"
    assert pace.wait_s("a", 5_000, 100.0) == 0.0


def test_steady_calls_below_the_rate_never_wait() -> None:
    pace = Pace(cost_per_s=100, burst_cost=10)
    assert [pace.wait_s("a", 10, second / 10) for second in range(100)] == pytest.approx([0.0] * 100)


def test_callers_that_have_gone_are_forgotten() -> None:
    pace = Pace(cost_per_s=5_000, burst_cost=20_000)
    for number in range(10_000):
        pace.wait_s(number, 1, float(number))
    assert len(pace._paid_until_s) <= 4096
