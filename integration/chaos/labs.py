"""`--labs N`: the same run in several labs at a time, each with a seed of its own, and one report of all rounds.

A round mostly waits, so a machine has room for nearly as many labs as it has cores. What each lab says is in a file of its
own. GPUs of the machine are hidden from the labs: their nodes have fake ones, and torch would open the real
ones.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.chaos.jobs import Say
from integration.chaos.report import Entry, Report
from integration.harness import WORK

#: How long a lab may take to end its last round and its job when its time is over. Then it is interrupted.
ENDS_S = 150.0
#: … and then, until it is killed: it removes its nodes.
REMOVES_S = 45.0
SAYS_S = 30.0
HIDE = 'for device in /dev/nvidia*; do [ ! -c "$device" ] || mount --bind /dev/null "$device"; done; exec "$@"'


@dataclass
class LabRun:
    """A lab with its rounds, in a process of its own."""

    seed: int
    process: subprocess.Popen[bytes]
    said: Path  # what it has said; a broken promise with the logs of all daemons
    report: Path

    def rounds(self) -> int:
        return self.said.read_text(errors="replace").count(", new steps after ")

    def result(self) -> dict[str, Any]:
        """Its report. Without one, it was killed or has failed by itself."""
        try:
            found: dict[str, Any] = json.loads(self.report.read_text())
        except (OSError, ValueError):
            last = self.said.read_text(errors="replace").strip().splitlines()[-1:]
            found = {"seed": self.seed, "rounds": [], "scans": 0, "longest_gap_s": 0.0}
            found["broken"] = f"there is no report (exit {self.process.returncode}): {' '.join(last)}"
        return found


def run(count: int, arguments: Sequence[str], seed: int, minutes: float, say: Say) -> tuple[int, dict[str, Any]]:
    """Runs the labs; the exit code, and the reports of all. `arguments`: those of one lab, without its seed."""
    labs = [_start(number, arguments, seed + number) for number in range(count)]
    report, interrupted = Report(seed), False
    try:
        _wait(labs, time.monotonic() + 60 * minutes + ENDS_S, say)
    except KeyboardInterrupt:
        interrupted = True
    for lab in labs:
        if lab.process.poll() is None:
            lab.process.send_signal(signal.SIGINT)
    ends_s = time.monotonic() + REMOVES_S
    for lab in labs:
        try:
            lab.process.wait(max(0.1, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            lab.process.kill()
            lab.process.wait()
    results = [lab.result() for lab in labs]
    for lab, result in zip(labs, results, strict=True):
        for one in result["rounds"]:
            report.add(Entry(**one))
        report.scans += result["scans"]
        report.longest_gap_s = max(report.longest_gap_s, result["longest_gap_s"])
        if result["broken"]:
            say(f"BROKEN, seed {lab.seed}: {result['broken'].partition(chr(10))[0]} (all of it: {lab.said})")
    say(report.table())
    broken = any(result["broken"] for result in results)
    return (130 if interrupted else int(broken)), {"labs": results}


def _start(number: int, arguments: Sequence[str], seed: int) -> LabRun:
    folder = WORK / "labs"
    folder.mkdir(parents=True, exist_ok=True)
    said, report = folder / f"{seed}.log", folder / f"{seed}.json"
    command = [sys.executable, "-m", "integration.chaos", *arguments, "--seed", str(seed), "--json"]
    if _has_gpus():
        command = ["unshare", "--mount", "sh", "-c", HIDE, "hide", *command]
    with said.open("wb") as errors, report.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, env={**os.environ, "PYTEST_XDIST_WORKER": f"l{number}"}
        )
    return LabRun(seed, process, said, report)


def _wait(labs: Sequence[LabRun], until_s: float, say: Say) -> None:
    said_s = time.monotonic()
    while any(lab.process.poll() is None for lab in labs) and time.monotonic() < until_s:
        time.sleep(0.5)
        if time.monotonic() - said_s > SAYS_S:
            said_s = time.monotonic()
            run_on = sum(lab.process.poll() is None for lab in labs)
            say(f"{sum(lab.rounds() for lab in labs)} rounds, {run_on} of {len(labs)} labs run")


def _has_gpus() -> bool:
    return any(stat.S_ISCHR(device.stat().st_mode) for device in Path("/dev").glob("nvidia*"))
