"""Shared by all workloads: arguments, a line per step, and the report of an error."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn


def steps(default_steps: int = 100, default_pace_s: float = 0.03) -> Iterator[int]:
    """Yields the numbers of the steps, at the requested pace; prints DONE after the last.

    With --end-file FILE the program continues until FILE exists, which then holds the number of steps: a test can let it
    end once all moves are done, however slow the machine is.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=default_steps)
    parser.add_argument("--end-file")
    parser.add_argument("--pace-s", type=float, default=default_pace_s)
    options, _ = parser.parse_known_args()
    step = 0
    while step < options.steps or options.end_file:
        yield step
        step += 1
        time.sleep(options.pace_s)
        if options.end_file and os.path.exists(options.end_file):
            with open(options.end_file) as file:
                options.steps, options.end_file = int(file.read()), None
    print("DONE", flush=True)


def say(step: int, *words: object) -> None:
    print("step", step, *words, flush=True)


def wrong(what: str) -> NoReturn:
    print("WRONG", what, flush=True)
    sys.exit(1)
