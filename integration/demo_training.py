"""The training job of the demonstration: its output as it comes, how many steps rank 1 has made, and its longest gap."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAIN = str(Path(__file__).parent / "workloads" / "train.py")
SHOW_EVERY = 20


class Ended(Exception):
    """The demonstration cannot go on. The text says why."""


class Training:
    """Runs until `end` exists, which then holds the number of steps. A thread reads the output of rank 1, and shows some."""

    def __init__(
        self, launcher: Sequence[str], end: Path, environment: Mapping[str, str], show_every: int = SHOW_EVERY
    ) -> None:
        self.output: list[str] = []
        self._show_every = show_every
        self.longest_s = 0.0
        self._changed = threading.Condition()
        self._ended = False
        self._job = subprocess.Popen(
            [*launcher, sys.executable, TRAIN, "--end-file", str(end)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the demonstration, which removes the lab
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def steps(self) -> int:
        return sum(line.startswith("step") for line in self.output)

    def _read(self) -> None:
        assert self._job.stdout is not None
        before = None
        for line in self._job.stdout:
            rank, _, text = line.rstrip("\n").partition(" ")
            if rank != "[1]":
                continue
            now = time.monotonic()
            if text.startswith("step"):
                if before is not None:
                    self.longest_s = max(self.longest_s, now - before)
                before = now
                if self.steps % self._show_every == 0:
                    print(f"  rank 1  {text}", flush=True)
            with self._changed:
                self.output.append(text)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def await_steps(self, steps: int, limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.steps >= steps, limit_s)
        if self.steps < steps:
            what = "has ended" if self._ended else f"is slow or hangs ({limit_s:.0f} s)"
            raise Ended(f"the training {what} after {self.steps} steps. See the messages above.")

    def await_end(self, limit_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, limit_s):
                raise Ended(f"the training did not end within {limit_s:.0f} s.")
        if self._job.wait(limit_s) != 0:
            raise Ended("the training failed. See the messages above.")

    def undisturbed(self) -> list[str]:
        """The output of rank 1 with as many steps, without moves."""
        command = [sys.executable, TRAIN, "--steps", str(self.steps), "--pace-s", "0"]
        done = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()


def first_difference(output: Sequence[str], reference: Sequence[str]) -> str | None:
    """Where two outputs differ, as text. None: they are identical."""
    if list(output) == list(reference):
        return None
    pairs = zip(output, reference, strict=False)
    line = next((number for number, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(output), len(reference)))
    shown = [f"  {name}: {list(its[line : line + 1])}" for name, its in (("moved", output), ("not moved", reference))]
    return "\n".join([f"the outputs differ from line {line + 1}:", *shown])
