"""When readings are made: at the same times on all nodes, without their talking to each other. Pure.

A reading has a number, and its time follows from the number and the clock, which all nodes of a training cluster keep
equal to some milliseconds. Within its period the time looks random, because readings at a fixed rhythm would see a job
that has the same rhythm always at the same point of its step.

Clocks are not exactly equal, and a busy node reads late. So each reading is made twice: `early`, which counts only if it
was complete EARLY_S after the time of the reading, and `late`, which begins LATE_S after it. A rank whose late number is
less than another rank's early one was behind it for certain, as long as the clocks of the two nodes differ by less than
ALLOWED_SKEW_S.
"""

from __future__ import annotations

EARLY_S = 0.02
LATE_S = 0.05
ALLOWED_SKEW_S = LATE_S - EARLY_S
#: Shorter ones would leave no room for both parts of a reading.
LEAST_PERIOD_S = 0.1

_MULTIPLIER, _RANGE = 0x9E3779B97F4A7C15, 1 << 64


def number_at(unix_s: float, period_s: float) -> int:
    """The number of the reading whose period contains that time."""
    return int(unix_s / period_s)


def time_of(number: int, period_s: float) -> float:
    """When to make a reading, in seconds of Unix time."""
    mixed = number * _MULTIPLIER % _RANGE
    mixed = (mixed ^ mixed >> 32) * _MULTIPLIER % _RANGE
    return number * period_s + (period_s - LATE_S) * (mixed / _RANGE)
