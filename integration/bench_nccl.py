"""What holding an NCCL job costs: from the first closed gate to the cut, and building its communicators again.

On the stand-in for NCCL, so the time that the real library takes to connect is not in it: these are the costs of our own
part, by the number of processes. Each line is the median of the moves of one rank to and fro.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from integration.harness import Cluster
from integration.nccl_nodes import NcclJob

SIZES = (2, 4, 8)
PHASES = ("quiesce", "detach", "reattach", "open")


@dataclass(frozen=True)
class Row:
    """Medians of one job's moves."""

    processes: int
    shape: str
    pause_s: float
    phases_s: dict[str, float]


def run(nodes: Cluster, moves: int = 4) -> list[Row]:
    """Rank 1 of each job moves to a spare node and back; the ranks are spread over the others."""
    return [_row(nodes, size, "grid" if size == 8 else "pairs", moves) for size in SIZES]


def _row(nodes: Cluster, size: int, shape: str, moves: int) -> Row:
    *homes, spare = nodes.lab.nodes
    places = [homes[rank % len(homes)] for rank in range(size)]
    job = NcclJob(nodes, places, shape=shape, steps=100_000, pace_s=0.005)
    job.await_lines(5)
    told = []
    try:
        for number in range(moves):
            told.append(nodes.move(job.ranks[1], spare if number % 2 == 0 else places[1], rank=1))
            job.await_progress()
    finally:
        for rank in job.ranks:
            rank.kill()
    spent = [{phase["name"]: phase["seconds"] for phase in result["phases"]} for result in told]
    medians = {name: statistics.median(each[name] for each in spent) for name in PHASES}
    return Row(size, shape, statistics.median(result["pause_s"] for result in told), medians)


def show(rows: list[Row]) -> None:
    print("\nNCCL on the stand-in: a rank moved to and fro, medians in seconds")
    print("  processes  shape   " + "  ".join(f"{name:>8}" for name in (*PHASES, "pause")))
    for row in rows:
        spent = "  ".join(f"{seconds:8.3f}" for seconds in (*row.phases_s.values(), row.pause_s))
        print(f"  {row.processes:>9}  {row.shape:<6}  {spent}", flush=True)
