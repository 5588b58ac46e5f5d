"""Measures the cost of a move to the other ranks of a job: how long they are stopped, and the pause that they see.

Also compares the throughput of a moved connection with that of a new one between the same processes in the same run."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field

from integration.harness import WORKLOADS, Cluster, Job, until

PORT = 7100
ROUTE = ("spare-1", "node-1", "spare-1")


@dataclass
class Table:
    """All numbers of one run."""

    pause_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)  # the longest time without a ping, as seen by the peer
    stopped_s: list[float] = field(default_factory=list)
    speeds: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # moved GB/s, fresh GB/s, ratio


def run(nodes: Cluster, mib: int = 1024) -> Table:
    """Moves one of two ranks, which has `mib` of memory, there and back; then times both connections, alternating."""
    table = Table()
    measure = nodes.folder / f"measure-{time.monotonic_ns()}"
    program = [sys.executable, str(WORKLOADS / "throughput.py"), "--measure", str(measure)]
    peer = nodes.start("node-2", [*program, "--serve", f"0.0.0.0:{PORT}"], job="throughput", rank=1)
    ready(peer)
    address = nodes.lab.address("node-2")
    rank = nodes.start(
        "node-1", [*program, "--connect", f"{address}:{PORT}", "--mib", str(mib)], job="throughput", rank=0
    )
    ready(rank)
    try:
        for number, to in enumerate(ROUTE):
            result = nodes.move(rank, to, timeout_s=300)
            (nodes.folder / f"{measure.name}.gap{number}").touch()
            until("the peer's report", lambda number=number: len(gaps(peer)) > number, 60)  # type: ignore[misc]
            table.pause_s.append(result["pause_s"])
            table.stopped_s.append(result["peers_stopped_s"])
        table.gap_s = gaps(peer)
        measure.touch()
        assert rank.finish(300) == 0, rank.text()
        for line in rank.lines():
            if found := re.fullmatch(r"(.*): ([\d.]+) ([\d.]+) ([\d.]+)", line):
                table.speeds[found[1]] = (float(found[2]), float(found[3]), float(found[4]))
    finally:
        rank.kill()
        peer.kill()
        for path in nodes.folder.glob(f"{measure.name}*"):
            path.unlink()
    return table


def ready(job: Job) -> None:
    until(f"{job.name} to be ready", lambda: "READY" in job.text(), 120)


def gaps(peer: Job) -> list[float]:
    return [float(line.split()[1]) for line in peer.lines() if line.startswith("gap ")]


def show(table: Table, mib: int) -> None:
    print(f"\nA {mib} MiB rank of a 2-rank job, moved {len(table.pause_s)} times with a connection to the other")
    for pause, gap, stopped in zip(table.pause_s, table.gap_s, table.stopped_s, strict=True):
        print(
            f"  pause {pause:.2f} s, as the other rank sees it {gap:.2f} s; it was stopped for {stopped * 1000:.2f} ms"
        )
    print(f"  stopped at most {max(table.stopped_s) * 1000:.2f} ms (goal: at most 5)")
    for name, (moved, fresh, ratio) in table.speeds.items():
        print(f"  {name}: moved {moved:.2f} GB/s, fresh {fresh:.2f} GB/s, ratio {ratio:.3f} (goal: at least 0.95)")
