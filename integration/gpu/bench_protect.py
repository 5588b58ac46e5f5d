"""Measures what snapshots cost a GPU rank beside their pauses: `python3 -m integration.gpu.bench_protect --gib 8`.

One job, in one run and alternately: so many seconds without a snapshot, and as many that begin with one. What is lost beside
the pause is what the job loses between snapshots: its memory is saved and copied to the other node in that time. Nothing here
passes or fails. DEVICE=cpu runs the same without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from integration.gpu.gpu_jobs import GPT, OUT, ROOT, TRAIN, why_not
from integration.harness import Job, cluster, until
from integration.job_commands import ask

NODES = ("node-1", "spare-1")


@dataclass(frozen=True)
class Round:
    usual: float  # steps a second without a snapshot
    steps: int  # in the time that begins with a snapshot
    seconds: float
    pause_s: float
    copied_s: float  # until the snapshot counted

    @property
    def lost_s(self) -> float:
        return self.seconds - self.pause_s - self.steps / self.usual


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0, help="device memory of the job")
    parser.add_argument("--gpt", action="store_true", help="train a GPT with torch.compile, and no ballast of --gib")
    parser.add_argument("--every-s", type=float, default=30.0, help="the time between snapshots")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if why_not():
        sys.exit(f"bench_protect: {why_not()}")
    program = [TRAIN, "--gib", str(options.gib), "--pace-s", "0"]
    if options.gpt:
        folder = ROOT / "integration" / ".work"
        folder.mkdir(exist_ok=True)
        program = [GPT, "--data", str(folder / "tokens"), "--pace-s", "0"]
    command = [sys.executable, *program, "--steps", "1000000000", "--digest-every", "1000000000"]
    rounds = []
    OUT.mkdir(parents=True, exist_ok=True)
    with cluster("gpuprotect", NODES) as nodes:
        job = nodes.start(NODES[0], command)
        until("the job's first steps", lambda: steps(job) > 50 or job.process.poll() is not None, 300)
        for number in range(options.rounds):
            usual = made(job, options.every_s) / options.every_s
            began, before = time.monotonic(), steps(job)
            taken = ask(nodes, "snapshot", job.name)
            copied_s = time.monotonic() - began
            made(job, options.every_s - copied_s)
            one = Round(usual, steps(job) - before, time.monotonic() - began, taken["pause_s"], copied_s)
            rounds.append(one)
            (OUT / "gpu-protect.json").write_text(json.dumps([asdict(each) for each in rounds], indent=1) + "\n")
            print(
                f"round {number + 1}: {usual:.1f} steps/s; pause {one.pause_s:.2f} s, copied after {copied_s:.1f} s; lost"
                f" beside the pause {one.lost_s:.2f} s in {one.seconds:.0f} s: {100 * one.lost_s / one.seconds:.2f} %",
                flush=True,
            )
        job.kill()
    lost = statistics.median(one.lost_s for one in rounds)
    print(f"median: {lost:.2f} s lost beside the pause, {100 * lost / options.every_s:.2f} % of {options.every_s:g} s")
    return 0


def made(job: Job, seconds: float) -> int:
    """Steps in that time."""
    before = steps(job)
    time.sleep(max(0.0, seconds))
    return steps(job) - before


def steps(job: Job) -> int:
    return job.text().count("\nstep ")


if __name__ == "__main__":
    sys.exit(main())
