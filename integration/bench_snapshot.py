"""Measures the pause of a snapshot of one CPU rank: `python -m integration.bench_snapshot --mib 1024`.

In one run, and alternately: with memory that is copied while the rank goes on, without (`snapshot_copy_on_write`), and as the
baseline a dump of the same program by plain criu into tmpfs. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from integration.bench import criu_by_hand
from integration.harness import WORKLOADS, Cluster, Job, cluster

NODES = ("node-1", "spare-1")
HOME = NODES[0]
WAIT_S = 600.0


@dataclass(frozen=True)
class Taken:
    pause_s: float
    parts: dict[str, float]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Taken:
        return cls(answer["pause_s"], {part["name"]: part["seconds"] for part in answer["parts"]})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="memory of the rank")
    parser.add_argument("--pages-per-step", type=int, default=256, help="pages that it writes every 20 ms")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    taken: dict[bool, list[Taken]] = {False: [], True: []}
    by_hand_s: list[float] = []
    with cluster("snapshots", NODES) as nodes:
        how = ("--mib", str(options.mib), "--pages-per-step", str(options.pages_per_step), "--pace-s", "0.02")
        job = nodes.workload(HOME, "dirty.py", *how, "--end-file", str(nodes.folder / "never"))
        job.await_lines(20, WAIT_S)
        for _ in range(options.rounds):
            by_hand_s.append(criu_by_hand([str(WORKLOADS / "dirty.py"), *how, "--steps", "100000000"])[0])
            for copied_later in taken:
                nodes.configure(HOME, {"snapshot_copy_on_write": copied_later})
                taken[copied_later].append(snapshot(nodes, job))
        nodes.tidy()
    print(table(options.mib, taken, statistics.median(by_hand_s)))
    return 0


def snapshot(nodes: Cluster, job: Job) -> Taken:
    job.await_progress(20, WAIT_S)
    done = nodes.migrator("job", "snapshot", job.name, "--json", timeout_s=WAIT_S)
    if done.returncode:
        raise SystemExit(f"the snapshot failed: {done.stdout}{done.stderr}")
    return Taken.of(json.loads(done.stdout))


def table(mib: int, taken: dict[bool, list[Taken]], by_hand_s: float) -> str:
    pauses = {on: statistics.median(one.pause_s for one in of) for on, of in taken.items()}
    names = ("twin", "criu-dump", "save-host")
    lines = [
        f"A snapshot of a rank with {mib} MiB; seconds, medians of {len(taken[True])}",
        "| | pause | of it the twin | of it criu's dump | copied while the rank runs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for on, of in taken.items():
        parts = [statistics.median(one.parts.get(name, 0.0) for one in of) for name in names]
        title = "copied while the rank goes on" if on else "dumped by criu while it waits"
        lines.append(f"| {title} | {pauses[on]:.2f} | {' | '.join(f'{part:.2f}' for part in parts)} |")
    lines.append(f"| `criu dump` by hand | {by_hand_s:.2f} | | | |")
    ratios = pauses[True] / pauses[False], pauses[True] / by_hand_s
    lines.append(f"\npause ÷ pause without: {ratios[0]:.2f}; ÷ `criu dump` by hand: {ratios[1]:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
