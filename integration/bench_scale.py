"""Measures how long the driver needs to bring all ranks of a large NCCL job to one cut: `python -m integration.bench_scale`.

The driver is real, with gRPC over Unix sockets. The daemons and their ranks are simulated in another process
(scale_job.py), so its processor time is not the driver's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from integration import scale_job
from integration.scale_job import JOB, RANKS_PER_NODE, USER_ID, Layout, uid
from migrator.cluster import Cluster
from migrator.quiesce.gates import Gates
from snapshotd.api import snapshotd_pb2 as pb

#: By the number of ranks: tensor × data × stages.
SIZES = {64: (4, 4, 4), 256: (8, 8, 4), 512: (8, 8, 8), 1024: (8, 16, 8), 2048: (8, 32, 8), 4096: (8, 32, 16)}


@dataclass
class Result:
    ranks: int
    threads: str
    skew: int
    rounds: int
    seconds: float
    processor_s: float
    memory_mib: float
    guessed: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.bench_scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096], choices=sorted(SIZES))
    parser.add_argument("--skew", type=int, nargs="*", default=[2, 100], help="how many micro-batches ranks are apart")
    parser.add_argument("--turns", action="store_true", help="main and autograd threads take turns")
    parser.add_argument("--slow", type=float, default=0.05, help="share of nodes that answer 50 ms late (default 0.05)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until the driver gives up (default 300)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(" ranks  threads  skew  rounds  to the cut  driver CPU    memory guessed")
    for ranks in options.ranks:
        for skew in options.skew:
            layout = Layout(*SIZES[ranks], turns=options.turns)
            # A process for each measurement, so that the memory is that of one.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                result = pool.submit(measure, layout, skew, options.slow, options.limit, options.seed).result()
            if options.json:
                print(json.dumps(vars(result)), flush=True)
                continue
            print(
                f"{result.ranks:6} {result.threads:>8} {result.skew:5} {result.rounds:7} {result.seconds:9.2f} s"
                f" {result.processor_s:9.2f} s {result.memory_mib:5.0f} MiB {result.guessed}",
                flush=True,
            )


def measure(layout: Layout, skew: int, slow: float, limit_s: float, seed: int) -> Result:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), context.Event()
        server = context.Process(target=_serve, args=(folder, layout, skew, slow, seed, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(60):
                raise SystemExit("the simulated daemons did not start")
            return asyncio.run(_drive(folder, layout, skew, limit_s))
        finally:
            server.terminate()
            server.join()


def _serve(folder: Path, layout: Layout, skew: int, slow: float, seed: int, ready: Event) -> None:
    asyncio.run(scale_job.serve(folder, scale_job.starts(layout, skew, seed), slow, seed, ready.set))


async def _drive(folder: Path, layout: Layout, skew: int, limit_s: float) -> Result:
    nodes = {f"node-{number}": f"unix:{folder}/node-{number}" for number in range(layout.ranks // RANKS_PER_NODE)}
    gates = Gates(Cluster(origin="bench", nodes=nodes))
    description = pb.MoveDescription(
        move="m-bench", rank_uid=uid(0), job=JOB, rank=0, source_node="node-0", user_id=USER_ID
    )
    assert not await gates.check(description)
    before, began = _processor_s(), time.monotonic()
    await gates.quiesce(description, limit_s)
    return Result(
        layout.ranks,
        "turns" if layout.turns else "one",
        skew,
        gates.rounds,
        time.monotonic() - began,
        _processor_s() - before,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        len(gates.guessed),
    )


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
