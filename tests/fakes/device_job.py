"""Runs integration/workloads/device_steps.py as a child of a test, and always ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from snapshotd.proc.tree import Process

PROGRAM = Path(__file__).resolve().parents[2] / "integration" / "workloads" / "device_steps.py"
WAIT_S = 60.0


class DeviceJob:
    """The output goes to a file, so that the job can be dumped and the output read at any time."""

    def __init__(self, output: Path, environment: dict[str, str], *options: str) -> None:
        self.output = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-u", PROGRAM, *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self.popen.pid

    @property
    def process(self) -> Process:
        return Process.of(self.pid)

    def lines(self) -> list[str]:
        """The complete lines that the job has printed."""
        return self.output.read_text().rpartition("\n")[0].splitlines()

    def wait_for(self, start: str) -> str:
        """Waits for a line with this prefix and returns it. AssertionError if the job ends without it."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            ended = self.popen.poll() is not None
            for line in self.lines():
                if line.startswith(start):
                    return line
            assert not ended, f"the job ended with {self.popen.returncode} before {start!r}: {self.lines()[-5:]}"
            time.sleep(0.01)
        raise AssertionError(f"no {start!r} within {WAIT_S:g} s: {self.lines()[-5:]}")

    def steps(self) -> int:
        return sum(line.startswith("step ") for line in self.lines())

    def wait_for_steps(self, more: int) -> None:
        """Waits until the job has done so many more steps."""
        self.wait_for(f"step {self.steps() + more - 1} ")

    def end_soon(self) -> tuple[str, str]:
        """Lets a job that was started with `--end-file OUTPUT.end` end in some steps. Returns the option for as many."""
        steps = str(self.steps() + 10)
        (self.output.parent / "end").write_text(steps)
        (self.output.parent / "end").rename(f"{self.output}.end")
        return "--steps", steps

    def finish(self) -> list[str]:
        """Waits for the successful end of the job, and returns its output."""
        assert self.popen.wait(WAIT_S) == 0, self.lines()[-5:]
        return self.lines()

    def end(self) -> None:
        """Kills the job and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(WAIT_S)
