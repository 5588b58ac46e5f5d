"""Brings up a lab, moves one rank of a small training job, and compares the losses with an unmoved run (`make demo`)."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO

from migrator.lab import Lab
from snapshotd.api.errors import SnapshotError

MIGRATOR = (sys.executable, "-m", "migrator.cli")
TRAIN = str(Path(__file__).parent / "workloads" / "train.py")
NODES = ("node-1", "node-2", "spare-1")
STEPS, SHOW_EVERY, MOVE_AT = 240, 10, 80
INTERRUPTED = 130


def main() -> int:
    # Both end the demonstration through `finally`, also where a shell started it with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    lab = Lab("demo")
    print(f"Bringing up a cluster on this machine: {', '.join(NODES)}, each with its own daemon.", flush=True)
    try:
        lab.down()
        try:
            lab.up(NODES)
            return demonstrate(lab)
        finally:
            lab.down()
    except KeyboardInterrupt:
        print("\nInterrupted. The cluster was removed.", file=sys.stderr)
        return INTERRUPTED
    except SnapshotError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not interrupted
    raise KeyboardInterrupt


def demonstrate(lab: Lab) -> int:
    environment = {**os.environ, "MIGRATOR_CLUSTER": str(lab.cluster_path)}
    command = [sys.executable, TRAIN, "--steps", str(STEPS)]
    print(
        "\n$ migrator lab run --job demo -- python train.py        (two ranks; the output of rank 1 is shown)",
        flush=True,
    )
    job = subprocess.Popen(
        [*MIGRATOR, "lab", "--lab", lab.name, "run", "--job", "demo", "--", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C goes to the demonstration, which removes the lab
    )
    assert job.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=collect, args=(job.stdout, lines), daemon=True).start()

    output: list[str] = []
    move: subprocess.Popen[str] | None = None
    longest_s, before = 0.0, None
    while (line := lines.get()) is not None:
        rank, _, text = line.partition(" ")
        if rank != "[1]":
            continue
        now = time.monotonic()
        if before is not None:
            longest_s = max(longest_s, now - before)
        before = now
        output.append(text)
        if len(output) % SHOW_EVERY == 1 and text.startswith("step"):
            print(f"  rank 1  {text}", flush=True)
        if len(output) == MOVE_AT:
            print("\n$ migrator move --rank 1 --to spare-1", flush=True)
            move = subprocess.Popen(
                [*MIGRATOR, "move", "--rank", "1", "--to", "spare-1"],
                env=environment,
                text=True,
                start_new_session=True,
            )
    if job.wait() != 0 or move is None or move.wait() != 0:
        print("demo: the job or the move failed. See the messages above.", file=sys.stderr)
        return 1

    print("\nRunning the same training without a move, for comparison.", flush=True)
    reference = subprocess.run(
        [*command, "--pace-s", "0"], env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if output != reference:
        pairs = zip(output, reference, strict=False)
        first = next(
            (index for index, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(output), len(reference))
        )
        print(f"demo: the outputs differ from line {first + 1}:", file=sys.stderr)
        for name, its in (("moved", output), ("not moved", reference)):
            print(f"  {name}: {its[first : first + 1]}", file=sys.stderr)
        return 1
    print(f"  All {len(output) - 1} losses are identical. The longest gap between two steps was {longest_s:.1f} s.")
    return 0


def collect(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


if __name__ == "__main__":
    sys.exit(main())
