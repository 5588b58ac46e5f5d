"""Measures how long the driver needs to bring all ranks of a large NCCL job to one cut: `python -m integration.bench_scale`.

The driver is real, with gRPC over Unix sockets. The daemons and their ranks are simulated in another process
(scale_job.py), so its processor time is not the driver's. No search can take fewer than two rounds: one to learn where
the ranks are, one to see that they have arrived; with slow nodes each takes at least SLOW_S. "Stall" is the longest time
for which the driver's event loop did nothing else: the lease is renewed there, every 7.5 s.

`--against COMMIT` measures an earlier version too, in a temporary worktree, without lost answers: a call whose answer was
lost ended a move then. `--plot` draws both as text, for RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from integration import scale_job
from integration.scale_job import JOB, RANKS_PER_NODE, USER_ID, Layout, Weather, uid
from migrator.cluster import Cluster
from migrator.quiesce.gates import Gates
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError

#: By the number of ranks: tensor × data × stages.
SIZES = {64: (4, 4, 4), 256: (8, 8, 4), 512: (8, 8, 8), 1024: (8, 16, 8), 2048: (8, 32, 8), 4096: (8, 32, 16)}
ROOT = Path(__file__).parents[1]
_OWN = ("integration/bench_scale.py", "integration/scale_job.py")
TICK_S = 0.005
_HEAD = "version   ranks  threads  skew  rounds  to the cut  at least  driver CPU    memory    stall  guessed"


@dataclass
class Result:
    ranks: int
    threads: str
    skew: int
    rounds: int
    seconds: float | None  # None: not within the limit
    least_s: float
    processor_s: float
    memory_mib: float
    stall_s: float
    guessed: int
    version: str = "now"

    def __str__(self) -> str:
        seconds = "      never" if self.seconds is None else f"{self.seconds:9.2f} s"
        return (
            f"{self.version:8} {self.ranks:6} {self.threads:>8} {self.skew:5} {self.rounds:7} {seconds} {self.least_s:7.2f} s"
            f" {self.processor_s:9.2f} s {self.memory_mib:5.0f} MiB {self.stall_s:6.2f} s {self.guessed:8}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m integration.bench_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096], choices=sorted(SIZES))
    parser.add_argument("--skew", type=int, nargs="*", default=[2, 100], help="how many micro-batches ranks are apart")
    parser.add_argument("--turns", action="store_true", help="main and autograd threads take turns")
    parser.add_argument("--slow", type=float, default=0.05, help="share of nodes that answer 50 ms late (default 0.05)")
    parser.add_argument("--lost", type=float, default=0.0, help="share of answers that are lost (default 0)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until the driver gives up (default 300)")
    parser.add_argument("--against", metavar="COMMIT", help="measure this version too")
    parser.add_argument("--plot", action="store_true", help="draw the processor time of the driver as text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one object per measurement")
    options = parser.parse_args()
    if not options.json:
        print(_HEAD)
    results = []
    for ranks in options.ranks:
        for skew in options.skew:
            layout = Layout(*SIZES[ranks], turns=options.turns)
            # A process for each measurement, so that the memory is that of one.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                weather = Weather(options.slow, options.lost)
                result = pool.submit(measure, layout, skew, weather, options.limit, options.seed).result()
            found = [result]
            if options.against:
                with _checkout(options.against) as folder:
                    found.append(_measure_in(folder, options, ranks, skew))
            for one in found:
                print(json.dumps(vars(one)) if options.json else one, flush=True)
            results += found
    if options.plot:
        print(*plotted(results), sep="\n")


@contextlib.contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """That version, with this file and the simulated job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            for path in _OWN:
                shutil.copyfile(ROOT / path, folder / path)
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def _measure_in(folder: Path, options: argparse.Namespace, ranks: int, skew: int) -> Result:
    command = [sys.executable, "-m", "integration.bench_scale", "--json", "--ranks", str(ranks), "--skew", str(skew)]
    command += ["--slow", str(options.slow), "--limit", str(options.limit), "--seed", str(options.seed)]
    command += ["--turns"] if options.turns else []
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return Result(**{**json.loads(done.stdout.splitlines()[-1]), "version": options.against[:8]})


def plotted(results: Sequence[Result], width: int = 60) -> list[str]:
    """Bars of the processor time, on a logarithmic scale from 10 ms on: each # is the same factor."""
    most = max(result.processor_s for result in results)
    lines = []
    for result in sorted(results, key=lambda one: (one.skew, one.ranks, one.version != "now")):
        share = math.log(max(1.01, result.processor_s / 0.01)) / math.log(max(2.0, most / 0.01))
        bar = "#" * max(1, round(width * share))
        end = f"{result.processor_s:.2f} s" + (" and never there" if result.seconds is None else "")
        lines.append(f"skew {result.skew:3}  {result.ranks:5} ranks  {result.version:8} {bar} {end}")
    return lines


def measure(layout: Layout, skew: int, weather: Weather, limit_s: float, seed: int) -> Result:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), context.Event()
        server = context.Process(target=_serve, args=(folder, layout, skew, weather, seed, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(60):
                raise SystemExit("the simulated daemons did not start")
            return asyncio.run(
                _drive(folder, layout, skew, max(scale_job.delays(layout.ranks, weather, seed)), limit_s)
            )
        finally:
            server.terminate()
            server.join()


def _serve(folder: Path, layout: Layout, skew: int, weather: Weather, seed: int, ready: Event) -> None:
    asyncio.run(scale_job.serve(folder, scale_job.starts(layout, skew, seed), weather, seed, ready.set))


async def _drive(folder: Path, layout: Layout, skew: int, slowest_s: float, limit_s: float) -> Result:
    nodes = {f"node-{number}": f"unix:{folder}/node-{number}" for number in range(layout.ranks // RANKS_PER_NODE)}
    gates = Gates(Cluster(origin="bench", nodes=nodes))
    description = pb.MoveDescription(
        move="m-bench", rank_uid=uid(0), job=JOB, rank=0, source_node="node-0", user_id=USER_ID
    )
    refused = await gates.check(description)
    assert not refused, refused
    stalls: list[float] = []
    ticking = asyncio.create_task(_tick(stalls))
    before, began = _processor_s(), time.monotonic()
    reached = True
    try:
        await gates.quiesce(description, limit_s)
    except SnapshotError as error:
        print(error.message, file=sys.stderr)
        reached = False
    seconds, processor_s = time.monotonic() - began, _processor_s() - before
    ticking.cancel()
    return Result(
        layout.ranks,
        "turns" if layout.turns else "one",
        skew,
        gates.rounds,
        seconds if reached else None,
        2 * slowest_s,
        processor_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        max(stalls, default=0.0),
        len(gates.guessed),
    )


async def _tick(stalls: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        stalls.append(time.monotonic() - began - TICK_S)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
