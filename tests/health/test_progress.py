"""Ranks without progress and stragglers, over counters of a simulated job whose ranks wait for each other."""

from __future__ import annotations

import random

import pytest

from snapshotd.health.progress import LEAST_STALL_S, WINDOW, Job, Progress, Straggler

QUEUE = 40  # operations that a rank may be ahead of the slowest one
PER_STEP = 20  # operations in a step


def counted(*phases: tuple[dict[str, float], int], seed: int = 1) -> list[dict[str, int]]:
    """The operations of each rank after each second of phases (seconds that a step takes, duration). A rank whose steps take
    longer makes the others wait."""
    noise = random.Random(seed)
    exact = dict.fromkeys(phases[0][0], 0.0)
    found = []
    for steps_s, seconds in phases:
        for _ in range(seconds * 10):
            slowest = min(exact.values())
            for rank, step_s in steps_s.items():
                exact[rank] = min(exact[rank] + 0.1 * PER_STEP / step_s * noise.uniform(0.8, 1.2), slowest + QUEUE)
            found.append({rank: int(count) for rank, count in exact.items()})
    return found[9::10]


def named(readings: list[dict[str, int]]) -> list[Straggler | None]:
    job = Job()
    return [job.add(second, reading) for second, reading in enumerate(readings)]


EQUAL = dict.fromkeys("abcdefgh", 1.0)


@pytest.mark.parametrize(("slower", "loss"), [(1.25, 0.2), (2.0, 0.5)])
def test_a_rank_that_becomes_slow_is_named_with_what_the_job_loses(slower: float, loss: float) -> None:
    found = named(counted((EQUAL, 120), (EQUAL | {"c": slower}, 2 * WINDOW)))
    assert found[:120] == [None] * 120
    last = found[-1]
    assert last is not None
    assert last.rank == "c"
    assert last.lost_share == pytest.approx(loss, abs=0.03)
    assert last.behind > PER_STEP / 2


def test_a_job_that_becomes_slower_as_a_whole_has_no_straggler() -> None:
    """Its ranks take turns at being the last one."""
    readings = [{rank: 20 * second + (second + index) % 8 for index, rank in enumerate(EQUAL)} for second in range(100)]
    slow = [
        {rank: 2000 + 10 * second + (second + index) % 8 for index, rank in enumerate(EQUAL)} for second in range(100)
    ]
    assert named([*readings, *slow]) == [None] * 200


@pytest.mark.parametrize("seed", range(5))
def test_equal_ranks_have_no_straggler(seed: int) -> None:
    """Chance makes some rank the last one for a while, but the job does not become slower."""
    assert named(counted((EQUAL, 600), seed=seed)) == [None] * 600


def test_a_rank_that_stops_is_stalled_and_one_that_waits_at_a_checkpoint_is_not() -> None:
    rank = Progress()
    for second in range(100):
        assert rank.add(second, second * PER_STEP) is None
    assert rank.add(99 + LEAST_STALL_S - 1, 99 * PER_STEP) is None
    stalled = rank.add(99 + LEAST_STALL_S, 99 * PER_STEP)
    assert stalled is not None
    assert stalled.for_s == LEAST_STALL_S
    assert stalled.usual_s == pytest.approx(1 / PER_STEP)
    assert rank.add(500.0, 99 * PER_STEP + 1) is None, "it goes on"


def test_a_rank_with_long_steps_is_given_more_time() -> None:
    rank = Progress()
    for number in range(10):
        rank.add(number * 60.0, number)
    assert rank.add(540.0 + 1000.0, 9) is None
    assert rank.add(540.0 + 6000.0, 9) is not None


def test_a_rank_that_has_not_begun_or_was_moved_is_not_stalled() -> None:
    rank = Progress()
    assert [rank.add(second * 1000.0, 0) for second in range(5)] == [None] * 5
    for second in range(10):
        rank.add(5000.0 + second, second)
    rank.moved()
    assert rank.add(9000.0, 9) is None
    assert rank.add(99_000.0, 3) is None, "a new process counts from zero"
