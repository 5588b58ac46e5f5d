"""`make demo`: a lab, a little training job, a move in the middle of it, and the proof that nothing happened to it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from migrator.lab import Lab

MIGRATOR = (sys.executable, "-m", "migrator.cli")
TRAIN = str(Path(__file__).parent / "workloads" / "train.py")
NODES = ("node-1", "node-2", "spare-1")
STEPS, SHOW_EVERY, MOVE_AT = 240, 10, 80


def main() -> int:
    lab = Lab("demo")
    print(f"A cluster of {len(NODES)} nodes on this machine, each with a daemon: {', '.join(NODES)}", flush=True)
    lab.down()
    lab.up(NODES)
    try:
        return demonstrate(lab)
    finally:
        lab.down()


def demonstrate(lab: Lab) -> int:
    environment = {**os.environ, "MIGRATOR_CLUSTER": str(lab.cluster_path)}
    command = [sys.executable, TRAIN, "--steps", str(STEPS)]
    print("\n$ migrator lab run --job demo -- python train.py        (two ranks; rank 1 is shown)", flush=True)
    job = subprocess.Popen(
        [*MIGRATOR, "lab", "--lab", lab.name, "run", "--job", "demo", "--", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert job.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=collect, args=(job.stdout, lines), daemon=True).start()

    losses: list[str] = []
    move: subprocess.Popen[str] | None = None
    longest_s, before = 0.0, None
    while (line := lines.get(timeout=120)) is not None:
        rank, _, text = line.partition(" ")
        if rank != "[1]":
            continue
        now = time.monotonic()
        if before is not None:
            longest_s = max(longest_s, now - before)
        before = now
        losses.append(text)
        if len(losses) % SHOW_EVERY == 1 and text.startswith("step"):
            print(f"  rank 1  {text}", flush=True)
        if len(losses) == MOVE_AT:
            print("\n$ migrator move --rank 1 --to spare-1", flush=True)
            move = subprocess.Popen([*MIGRATOR, "move", "--rank", "1", "--to", "spare-1"], env=environment, text=True)
    if job.wait() != 0 or move is None or move.wait() != 0:
        print("the job or the move failed; see the messages above", file=sys.stderr)
        return 1

    print("\nThe same training without us, to compare:", flush=True)
    reference = subprocess.run(
        [*command, "--pace-s", "0"], env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if losses != reference:
        first = next(index for index, pair in enumerate(zip(losses, reference, strict=False)) if pair[0] != pair[1])
        print(f"DIFFERENT from line {first}: {losses[first]!r} is not {reference[first]!r}", file=sys.stderr)
        return 1
    print(f"  {len(losses) - 1} losses, every digit the same; the longest silence between two steps: {longest_s:.1f} s")
    return 0


def collect(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


if __name__ == "__main__":
    sys.exit(main())
