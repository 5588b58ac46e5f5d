"""Measures the overhead for NCCL jobs: per call, and in a move from the first closed gate to rebuilt communicators.

The NCCL library is a fake, so the time that the real library takes to connect is not included: the numbers are the cost
of the shim and the daemons, by number of processes. Each line is the median over moves of one rank there and back.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from integration.harness import WORK, Cluster
from integration.nccl_nodes import SOURCES, NcclJob, library_dir

PROGRAMS = Path(__file__).parents[1] / "tests" / "shim" / "nccl" / "programs"
SHIM = Path(__file__).parents[1] / "shim" / "lib" / "libsnapshim.so"

SIZES = (2, 4, 8)
PHASES = ("quiesce", "detach", "reattach", "open")


@dataclass(frozen=True)
class Row:
    """Medians of one job's moves."""

    processes: int
    shape: str
    pause_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True)
class Calls:
    """Nanoseconds per call of an operation that does nothing, and per step of a small synchronous all-reduce."""

    direct: float
    shim: float
    grouped: float
    step: float

    @property
    def share(self) -> float:
        return (self.shim - self.direct) / self.step


def calls(count: int = 10_000_000, steps: int = 20_000) -> Calls:
    """Measures a call with and without the shim, and a small step, in one run."""
    folder = WORK / "nccl" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    library = library_dir()
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-Wl,--no-as-needed")
    empty = folder / "libnccl.so.2"
    _make(*flags, "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2", "-o", empty, PROGRAMS / "empty.c")
    _make(*flags, "-o", folder / "bench", PROGRAMS / "bench.c", SHIM, empty, "-ldl", f"-Wl,-rpath,{folder}")
    real = (library / "libnccl.so.2", library / "libfakestreams.so.1", f"-Wl,-rpath,{library}")
    _make(*flags, "-o", folder / "step", PROGRAMS / "step.c", *real)
    said = _said(folder / "bench", count) | _said(folder / "step", steps)
    return Calls(said["direct"], said["shim"], said["group"], said["step"])


def _make(*arguments: str | Path) -> None:
    subprocess.run(["cc", *arguments], check=True)


def _said(program: Path, count: int) -> dict[str, float]:
    environment = {**os.environ, "FAKE_NCCL_ADDR": "127.0.0.1"}
    words = subprocess.run(
        [program, str(count)], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


def show_calls(found: Calls) -> None:
    print("\nNCCL calls, nanoseconds each")
    print(f"  without the shim {found.direct:.1f}   with it {found.shim:.1f}   in groups of four {found.grouped:.1f}")
    print(
        f"  a small all-reduce between two processes, waited for: {found.step / 1000:.1f} µs; the shim adds {found.share:.2%}"
    )


def run(nodes: Cluster, moves: int = 4) -> list[Row]:
    """Moves rank 1 of each job to a spare node and back; the ranks are spread over the other nodes."""
    return [_row(nodes, size, "grid" if size == 8 else "pairs", moves) for size in SIZES]


def _row(nodes: Cluster, size: int, shape: str, moves: int) -> Row:
    *homes, spare = nodes.lab.nodes
    places = [homes[rank % len(homes)] for rank in range(size)]
    job = NcclJob(nodes, places, shape=shape, pace_s=0.005)
    job.await_lines(5)
    answer = []
    try:
        for number in range(moves):
            answer.append(nodes.move(job.ranks[1], spare if number % 2 == 0 else places[1], rank=1))
            job.await_progress()
    finally:
        for rank in job.ranks:
            rank.kill()
    spent = [{phase["name"]: phase["seconds"] for phase in result["phases"]} for result in answer]
    medians = {name: statistics.median(each[name] for each in spent) for name in PHASES}
    return Row(size, shape, statistics.median(result["pause_s"] for result in answer), medians)


def show(rows: list[Row]) -> None:
    print("\nNCCL on the stand-in: a rank moved to and fro, medians in seconds")
    print("  processes  shape   " + "  ".join(f"{name:>8}" for name in (*PHASES, "pause")))
    for row in rows:
        spent = "  ".join(f"{seconds:8.3f}" for seconds in (*row.phases_s.values(), row.pause_s))
        print(f"  {row.processes:>9}  {row.shape:<6}  {spent}", flush=True)
