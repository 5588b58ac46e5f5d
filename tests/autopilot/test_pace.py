"""The pace of a job, and the period of its steps where the counters show one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from migrator.autopilot.pace import POINT_S, POINTS, History, Period
from migrator.autopilot.policy import Progress
from migrator.autopilot.progress import Jobs
from tests.autopilot.test_progress import FIRST, RANKS, at, tell

READ_S = 0.5
BEGAN = 1_800_000_000.0


def read(counts: Callable[[float], int], seconds: float, history: History | None = None, comm: int = 7) -> History:
    """A job whose collectives are counted twice a second."""
    history = history or History()
    for number in range(int(seconds / READ_S)):
        history.add(BEGAN + number * READ_S, comm, counts(number * READ_S))
    return history


def steps(step_s: float, bursts: Iterable[tuple[float, int]]) -> Callable[[float], int]:
    """Steps that make so many collectives at these times within a step."""
    each = list(bursts)
    total = sum(count for _, count in each)

    def counts(now_s: float) -> int:
        done, left_s = divmod(now_s, step_s)
        return int(done) * total + sum(count for at_s, count in each if left_s >= at_s)

    return counts


def test_points_are_the_rate_of_ten_minutes_at_most() -> None:
    history = read(lambda now_s: int(now_s * 20), 700)
    points = history.pace.points
    assert POINTS - 1 <= len(points) <= POINTS
    assert {round(per_s, 6) for _, per_s in points} == {20.0}
    assert [late - early for (early, _), (late, _) in pairwise(points)] == [POINT_S] * (len(points) - 1)


def test_time_without_readings_is_a_gap_and_not_a_standstill() -> None:
    history = History()
    for number in [*range(100), *range(200, 300)]:
        history.add(BEGAN + number * READ_S, 7, 10 * number if number < 100 else 1000 + 10 * (number - 200))
    assert {per_s for _, per_s in history.pace.points} == {20.0}
    times = [unix_s for unix_s, _ in history.pace.points]
    assert max(late - early for early, late in pairwise(times)) > 50


@pytest.mark.parametrize("comm", [7, 8])
def test_counters_that_begin_anew_are_not_compared_with_the_old_ones(comm: int) -> None:
    history = read(lambda now_s: 1_000_000 + int(now_s * 20), 20)
    for number in range(40):
        history.add(BEGAN + 20 + number * READ_S, comm, number * 10)
    assert {round(per_s, 6) for _, per_s in history.pace.points} == {20.0}


def test_period_of_steps_is_recognised() -> None:
    found = read(steps(5.2, [(3.0, 12)]), 60).pace.period
    assert found is not None
    assert (round(found.seconds, 1), found.collectives) == (5.2, 12)
    twice = read(steps(8.0, [(2.0, 12), (6.0, 30)]), 120).pace.period  # with two pauses in each step
    assert twice == Period(8.0, 42)


@pytest.mark.parametrize(
    "counts",
    [
        lambda now_s: int(now_s * 20),  # always busy
        steps(0.7, [(0.0, 1)]),  # a rhythm that readings twice a second show wrongly
        steps(0.35, [(0.0, 10)]),
        lambda now_s: int(now_s // 3) ** 2,  # never the same number
        lambda now_s: int(now_s**0.5) * 5,  # ever slower
        lambda now_s: 7,  # standing still
    ],
)
def test_no_period_is_invented(counts: Callable[[float], int]) -> None:
    assert read(counts, 120).pace.period is None


def test_period_is_forgotten_when_the_job_stands_still() -> None:
    history = read(steps(4.0, [(2.0, 12)]), 60)
    assert history.pace.period is not None
    last = steps(4.0, [(2.0, 12)])(59.5)
    for number in range(120, 160):
        history.add(BEGAN + number * READ_S, 7, last)
    assert history.pace.period is None


def test_what_nodes_say_becomes_the_pace_of_the_job() -> None:
    jobs = Jobs(Progress())
    assert jobs.pace(RANKS[0].job_key) is None
    tell(jobs, range(FIRST, FIRST + 200))
    jobs.alarms(at(FIRST + 200))
    pace = jobs.pace(RANKS[0].job_key)
    assert pace is not None
    assert [round(per_s / 2.5) for _, per_s in pace.points][::2] == [2, 1]  # it becomes slow after ten seconds
    jobs.forget(RANKS[:1])  # the others are being moved: its history stays
    assert jobs.pace(RANKS[0].job_key) == pace
    jobs.forget([])
    assert jobs.pace(RANKS[0].job_key) is None
