"""When readings are made, and for how long a number has stayed the same."""

from __future__ import annotations

import pytest

from migrator.autopilot.progress import ALLOWED_SKEW_S
from snapshotd.health.settings import Settings
from snapshotd.progress import schedule
from snapshotd.progress.unchanged import Unchanged


@pytest.mark.parametrize("period_s", [schedule.LEAST_PERIOD_S, 0.5, 7.0])
def test_both_parts_of_a_reading_are_within_its_period(period_s: float) -> None:
    first = schedule.number_at(1_800_000_000.0, period_s)
    for number in range(first, first + 500):
        at_s = schedule.time_of(number, period_s)
        assert number * period_s <= at_s
        assert at_s + schedule.LATE_S <= (number + 1) * period_s + 1e-6
        assert schedule.number_at(at_s, period_s) in (number, number - 1)  # a time in seconds has few digits left


def test_readings_are_spread_over_their_periods() -> None:
    room = 0.5 - schedule.LATE_S
    offsets = [(schedule.time_of(number, 0.5) - number * 0.5) / room for number in range(1000, 2000)]
    for tenth in range(10):
        assert 60 < sum(tenth <= offset * 10 < tenth + 1 for offset in offsets) < 140


def test_the_autopilot_allows_the_clocks_as_much_as_the_schedule_does() -> None:
    assert pytest.approx(schedule.ALLOWED_SKEW_S) == ALLOWED_SKEW_S


def test_intervals_that_leave_no_room_for_a_reading_are_refused() -> None:
    assert not Settings(progress_interval_s=0).problems()
    assert not Settings(progress_interval_s=0.1).problems()
    assert "progress_interval_s" in Settings(progress_interval_s=0.05).problems()[0]


def test_time_without_a_change_and_the_longest_one_before() -> None:
    one = Unchanged()
    for now_s, value in ((0, 5), (10, 5), (30, 6), (40, 3), (100, 3)):
        one.add(float(now_s), "nccl", value)
    assert (one.unchanged_s, one.usual_s) == (60.0, 30.0)
    one.paused(120.0)
    one.add(130.0, "nccl", 3)
    assert one.unchanged_s == 10.0
    one.add(140.0, "tcp", 3)
    assert (one.unchanged_s, one.usual_s) == (0.0, 0.0)
