"""Measures what a job loses when one of its ranks is killed: `python -m integration.bench_rollback --ranks 4 --mib 1024`.

The same job is measured twice in one run: protected by `migrator protect`, and restarted at once, as soon as a process has
ended, from a checkpoint of its own in memory. Both are killed so long after their snapshot or checkpoint has counted; what is
done again begins earlier, with the cut. The time that is lost ends with the first step that had not been made before. Nothing
here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from integration.harness import WORKLOADS, cluster, processes_of, until
from integration.protecting import protected
from integration.torch_jobs import TorchJob, TorchLab

WAIT_S = 600.0
NODES = ("node-1", "node-2", "node-3", "node-4", "spare-1")
DDP = str(WORKLOADS / "ddp.py")
_STEP = re.compile(r"^step (\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class Lost:
    saved_s: float  # how long the job stood still for the snapshot or checkpoint
    noticed_s: float  # from the kill
    running_s: float  # from then until the job runs again, which may repeat steps
    lost_s: float  # from the kill to the first new step
    repeated_s: float  # of it, work since the cut of the snapshot, or since the checkpoint

    @property
    def down_s(self) -> float:
        """Without the work that is done again."""
        return self.lost_s - self.repeated_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, choices=range(1, len(NODES)))
    parser.add_argument("--mib", type=int, default=1024, help="memory of each rank")
    parser.add_argument("--since-s", type=float, nargs="+", default=[2.0, 15.0], help="time between snapshot and kill")
    options = parser.parse_args(arguments)
    results: dict[float, tuple[Lost, Lost]] = {}
    with cluster("rollbacks", NODES) as nodes:
        lab = TorchLab(nodes)
        flags = ("--ballast-mib", str(options.mib), "--pace-s", "0.05")
        job = lab.plain("ddp.py", *flags, "--until", "{end}", nodes=NODES[: options.ranks], name="rollback")
        job.await_steps(5, WAIT_S)
        ours = [rolled_back(job, since_s) for since_s in options.since_s]
        snapshot = json.loads(nodes.migrator("job", "snapshot", job.name, "--json", timeout_s=WAIT_S).stdout)
        lab.end()
    for since_s, mine in zip(options.since_s, ours, strict=True):
        results[since_s] = mine, restarted(options.ranks, flags, since_s)
    print(table(options, results))
    print(f"\nsnapshot: {json.dumps({name: snapshot.get(name) for name in ('pause_s', 'bytes', 'sent_bytes')})}")
    return 0


def rolled_back(job: TorchJob, since_s: float) -> Lost:
    with protected(job.cluster, job.name) as said:
        until("the snapshot", lambda: ", paused " in said.read_text(), WAIT_S)
        saved_s = float(re.findall(r", paused ([\d.]+) s", said.read_text())[-1])
        time.sleep(since_s)
        (victim,) = [pid for pid in processes_of(str(job.end)) if _rank_of(pid) == 1]
        lost = _lost(
            lambda: job.lines()[0],
            lambda: os.kill(victim, signal.SIGKILL),
            lambda: "rolling the job back" in said.read_text(),
            lambda: "rolled back" in said.read_text(),
            since_s,
            saved_s,
        )
    history = json.loads(job.cluster.migrator("history", "--json", timeout_s=WAIT_S).stdout)
    newest = max(history["rollbacks"], key=lambda one: one["ended_unix_s"])
    return replace(lost, repeated_s=newest["lost_s"])


class Launcher:
    """The same job on this machine, without `migrator run`. Its output goes to one file."""

    def __init__(self, ranks: int, folder: Path, flags: Sequence[str]) -> None:
        self.ranks, self.out = ranks, folder / "out"
        self._command = [sys.executable, DDP, *flags]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with self.out.open("ab") as file:
            self._processes = [
                subprocess.Popen(
                    self._command, stdout=file, stderr=file, env={**os.environ, **world, "RANK": str(rank)}
                )
                for rank in range(self.ranks)
            ]

    def kill_one(self) -> None:
        self._processes[1 % self.ranks].kill()

    def failed(self) -> bool:
        return any(one.poll() is not None for one in self._processes)

    def end(self) -> None:
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.wait()


def restarted(ranks: int, flags: Sequence[str], since_s: float) -> Lost:
    """The checkpoint lies in memory, which is the quickest for it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        launcher = Launcher(
            ranks, folder, [*flags, "--until", str(folder / "end"), "--checkpoint", str(folder / "saved")]
        )
        launcher.start()
        try:
            newest = folder / f"saved.{ranks - 1}"
            until("the first checkpoint", newest.exists, WAIT_S)
            time.sleep(since_s)

            def noticed() -> bool:
                if not launcher.failed():
                    return False
                launcher.end()
                launcher.start()
                return True

            since_s, made = time.time() - newest.stat().st_mtime, 0

            def kill() -> None:
                nonlocal made
                launcher.kill_one()
                made = len(_steps(_lines(launcher.out)))

            def runs() -> bool:
                return len(_steps(_lines(launcher.out))) > made + 1  # one may be under way when the rank is killed

            return _lost(lambda: _lines(launcher.out), kill, noticed, runs, since_s, 0.0)
        finally:
            launcher.end()


def _lost(
    lines: Callable[[], Sequence[str]],
    kill: Callable[[], None],
    noticed: Callable[[], bool],
    runs: Callable[[], bool],
    since_s: float,
    saved_s: float,
) -> Lost:
    kill()
    began = time.monotonic()
    reached = _furthest(lines())
    until("the failure to be noticed", noticed, WAIT_S)
    noticed_s = time.monotonic() - began
    until("the job to run again", runs, WAIT_S)
    running_s = time.monotonic() - began - noticed_s
    until("a step that is new", lambda: _furthest(lines()) > reached, WAIT_S)
    return Lost(saved_s, noticed_s, running_s, time.monotonic() - began, since_s)


def _steps(lines: Sequence[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := _STEP.match(line))]


def _furthest(lines: Sequence[str]) -> int:
    return max(_steps(lines), default=-1)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _rank_of(pid: int) -> int:
    try:
        found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return -1
    return int(found[1]) if found else -1


def table(options: Any, results: dict[float, tuple[Lost, Lost]]) -> str:
    lines = [
        f"A rank of {options.ranks} × {options.mib} MiB is killed; seconds",
        "| after the save | | noticed | then running again | new steps again | of it no repeated work | restart ÷ it |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for since_s, (ours, theirs) in results.items():
        for name, one in (("protected", ours), ("restarted", theirs)):
            ratio = (
                f"{theirs.down_s / ours.down_s:.1f}, {theirs.lost_s / ours.lost_s:.1f} in all" if one is ours else ""
            )
            lines.append(
                f"| {since_s:g} | {name} | {one.noticed_s:.2f} | {one.running_s:.2f} | {one.lost_s:.2f} | {one.down_s:.2f}"
                f" | {ratio} |"
            )
    pauses = [ours.saved_s for ours, _ in results.values()]
    return "\n".join([*lines, f"\npause of a snapshot, as `migrator protect` says: {statistics.median(pauses):.2f} s"])


if __name__ == "__main__":
    sys.exit(main())
