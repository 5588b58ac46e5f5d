"""Times between two snapshots, as they are given on the command line. Only the standard library: `migrator run` uses it."""

from __future__ import annotations

import argparse
import re

AUTO = "auto"
DEFAULT = "5m"
LEAST_S = 1.0
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float | None:
    """300, 90s, 5m or 2h; None for auto: what costs least. Raises ValueError."""
    if text == AUTO:
        return None
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh]?)", text)
    value_s = float(found[1]) * _UNITS_S[found[2]] if found is not None else 0.0
    if value_s < LEAST_S:
        raise ValueError(f"{text[:40]!r} is not a time between snapshots: write 300, 90s, 5m, 2h or auto")
    return value_s


def is_one(text: str) -> bool:
    try:
        seconds(text)
    except ValueError:
        return False
    return True


def argument(text: str) -> float | None:
    """For argparse."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
