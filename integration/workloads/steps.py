"""Shared by all workloads: arguments, a line per step, and the report of an error."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import NoReturn


def steps() -> Iterator[int]:
    """Yields the numbers of the steps, at the requested pace; prints DONE after the last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace-s", type=float, default=0.03)
    options, _ = parser.parse_known_args()
    for step in range(options.steps):
        yield step
        time.sleep(options.pace_s)
    print("DONE", flush=True)


def say(step: int, *words: object) -> None:
    print("step", step, *words, flush=True)


def wrong(what: str) -> NoReturn:
    print("WRONG", what, flush=True)
    sys.exit(1)
