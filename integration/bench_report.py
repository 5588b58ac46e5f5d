"""Measures what the report of a rank with many threads costs, next to one with few: `python -m integration.bench_report`.

The driver of a move asks every process for a report in every round. The rank is real, with the shim preloaded over the
stand-in for NCCL; its threads wait. "Daemon" is the whole request as snapshotd makes it, "shim" the answer alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from snapshotd.inprocess import ncclctl
from snapshotd.proc import tree
from tests.shim.nccl.conftest import Job, build

REPEATED = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.bench_report", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[4, 600])
    options = parser.parse_args()
    print("threads    daemon      shim")
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        for threads in options.threads:
            daemon_s, shim_s = measure(built, threads)
            print(f"{threads:7} {1000 * daemon_s:6.2f} ms {1000 * shim_s:6.2f} ms", flush=True)


def measure(built: Path, threads: int) -> tuple[float, float]:
    """Medians, in seconds."""
    with tempfile.TemporaryDirectory() as meeting:
        job = Job(built, Path(meeting))
        try:
            job.start("jobs.crowded", 1, CROWD=str(threads))
            job.reach(1)
            process, gate = tree.Process.of(job.processes[0].pid), job.gates().gates[0]
            ncclctl.close(process)
            return _median_s(lambda: ncclctl.read(process)), _median_s(gate.report)
        finally:
            job.kill()


def _median_s(act: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATED):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
