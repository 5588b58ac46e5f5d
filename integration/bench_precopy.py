"""Measures the pause of a rank that writes a tenth of its memory each second, and what it loses while memory is sent before.

Each move is next to `criu dump` + `criu restore` of the same program, and to a move without pre-copy, in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from integration.harness import WORKLOADS, Cluster, Job, until

#: Computes a step in about 40 ms on a free core, and writes so much in it that a tenth is written each second.
WORK, STEP_S = 40, 0.045


def run(nodes: Cluster, options: argparse.Namespace, by_hand: Callable[[Sequence[str]], tuple[float, float]]) -> None:
    mib = options.mib
    pages = round(mib * 256 * 0.1 * STEP_S)
    program = [str(WORKLOADS / "dirty.py"), "--mib", str(mib), "--pages-per-step", str(pages)]
    program += ["--work", str(WORK), "--pace-s", "0", "--steps", "100000000"]
    job = nodes.workload("node-1", "dirty.py", *program[1:], job="precopy")
    until("the rank to be ready", lambda: "READY" in job.text(), 300)
    print(f"\nPause of a {mib} MiB rank that writes {pages} pages a step, against `criu dump` + `criu restore` by hand")
    ratios, losses = [], []
    for number, to in zip(range(options.rounds), ["spare-1", "node-1"] * options.rounds, strict=False):
        usual = _rate(job, 10.0)
        result, lines = _moved(nodes, job, to, "--precopy-limit", str(options.precopy_limit))
        theirs = sum(by_hand(program))
        phases = {phase["name"]: phase["seconds"] for phase in result["phases"]}
        during = _before_the_pause(lines, phases["prepare"])
        ratios.append(result["pause_s"] / theirs)
        losses.append(1 - during / usual)
        print(
            f"  round {number + 1}: pause {result['pause_s']:.2f} s ({result['bytes'] >> 20} MiB in it,"
            f" {result['precopied_bytes'] >> 20} MiB before, in {phases['prepare']:.1f} s)   by hand {theirs:.2f} s"
            f"   ratio {ratios[-1]:.2f}   steps/s {usual:.1f} before, {during:.1f} during: {losses[-1] * 100:+.1f} % lost"
            f"   ({usual * pages * 100 / (mib * 256):.0f} % written a second)",
            flush=True,
        )
    plain, _ = _moved(nodes, job, "node-2")
    print(f"  without pre-copy: pause {plain['pause_s']:.2f} s")
    print(f"  median ratio {statistics.median(ratios):.2f}   median loss {statistics.median(losses) * 100:+.1f} %")
    job.kill()


def _rate(job: Job, seconds: float) -> float:
    before, began_s = len(job.lines()), time.monotonic()
    time.sleep(seconds)
    return (len(job.lines()) - before) / (time.monotonic() - began_s)


def _moved(nodes: Cluster, job: Job, to: str, *more: str) -> tuple[dict[str, Any], list[tuple[float, int]]]:
    """The result of a move, and how many lines the job had when."""
    lines = []
    with nodes.begin_move(job, to, more=more) as process:
        while process.poll() is None:
            lines.append((time.monotonic(), len(job.lines())))
            time.sleep(0.05)
        out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"the move failed: {out}\n{errors}\n{nodes.logs()}")
    return json.loads(out), lines


def _before_the_pause(lines: Sequence[tuple[float, int]], prepare_s: float) -> float:
    """Steps a second while memory was sent: in that time before the longest time without a line."""
    changes = [now for before, now in itertools.pairwise(lines) if now[1] != before[1]]
    gaps = [(after[0] - before[0], before) for before, after in itertools.pairwise(changes)]
    _, (end_s, count) = max(gaps)
    first_s, first = next(one for one in lines if one[0] >= end_s - prepare_s)
    return (count - first) / (end_s - first_s)
