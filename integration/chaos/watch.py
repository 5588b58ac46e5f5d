"""Looks for two running copies of a rank, and for steps made twice, every 150 ms while the rounds run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from integration.chaos import processes
from integration.chaos.jobs import Broken, ChaosJob
from integration.harness import Cluster

INTERVAL_S = 0.15
_EXITING = 0x4  # PF_EXITING of the kernel, in /proc/PID/stat
_KILLED = 1 << 8  # SIGKILL, in the pending signals of /proc/PID/status


#: Context switches of the main thread that show that it works. One that the shim has parked makes one or two when continued.
_WORKS = 6


@dataclass(frozen=True)
class Copy:
    pid: int
    started: int


Running = dict[Copy, int]  # with the context switches of its main thread


class Watch:
    """Call `check` from the thread that runs the rounds: it raises what was found."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.scans, self.longest_gap_s = 0, 0.0
        self._jobs: list[ChaosJob] = []
        self._first: dict[str, Running] = {}  # of ranks with several copies: as they were when first seen
        self._found: Broken | None = None
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def add(self, job: ChaosJob) -> None:
        with self._lock:
            self._jobs.append(job)

    def remove(self, job: ChaosJob) -> None:
        """From now on the ledgers of this job belong to the caller."""
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)

    def check(self) -> None:
        if self._found is not None:
            raise self._found

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._end.wait(INTERVAL_S) and self._found is None:
            with self._lock:
                try:
                    self._scan()
                except Broken as error:
                    self._found = error
            now_s = time.monotonic()
            self.scans, self.longest_gap_s = self.scans + 1, max(self.longest_gap_s, now_s - last_s)
            last_s = now_s

    def _scan(self) -> None:
        ranks = {job.marker(rank): job for job in self._jobs for rank in range(len(job.ranks))}
        found = running(self.nodes, list(ranks))
        first: dict[str, Running] = {}
        for marker, copies in found.items():
            if len(copies) < 2:
                continue
            before = self._first.get(marker, {})
            # Seen twice: one look is not at one moment, and a copy may have been frozen in between.
            both = [copy for copy in copies if copy in before]
            if ranks[marker].held_copy_runs:
                both = [copy for copy in both if copies[copy] >= before[copy] + _WORKS]
            if len(both) > 1:
                pids = ", ".join(str(copy.pid) for copy in both)
                raise Broken(f"{Path(marker).name}: two copies run at the same time, processes {pids}")
            first[marker] = {copy: before.get(copy, switches) for copy, switches in copies.items()}
        self._first = first
        for job in self._jobs:
            for ledger in job.ledgers:
                ledger.read()


def running(nodes: Cluster, markers: list[str]) -> dict[str, Running]:
    """The processes that can run now, by the marker in their command line: not stopped, frozen, or being killed."""
    found: dict[str, Running] = defaultdict(dict)
    for pid, words, group in processes.of_lab(nodes):
        if processes.is_keeper(words):
            continue
        for marker in markers:
            if marker.encode() in words:
                with contextlib.suppress(OSError, ValueError, LookupError):  # it has just ended
                    found[marker].update(_if_running(pid, group))
    return found


def _if_running(pid: int, group: Path) -> Running:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    state, flags, started = fields[0], int(fields[6]), int(fields[19])
    if state in "ZXTt" or flags & _EXITING or "frozen 1" in (group / "cgroup.events").read_text():
        return {}
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if (int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)) & _KILLED:
        return {}
    return {Copy(pid, started): int(status["voluntary_ctxt_switches"])}
