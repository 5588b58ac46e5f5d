"""Moves without faults, many of them: the daemons must not keep descriptors or memory of moves that are over."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from integration.chaos import jobs, processes
from integration.chaos.jobs import Say
from integration.chaos.watch import Watch
from integration.harness import Cluster, until
from integration.nccl_nodes import unsettled

#: What the daemons have after so many moves is the measure of what they may have later.
WARM_UP = 50
#: Moves over which the values are compared: at any moment, a connection may be about to close.
WINDOW = 10
MEMORY_GROWTH = 0.05


@dataclass
class Samples:
    """Of the processes of one daemon, after each move."""

    descriptors: list[int] = field(default_factory=list)
    #: Memory of the daemon, of the network process, and of all other children.
    parts_kib: list[tuple[int, int, int]] = field(default_factory=list)
    #: The number of those other children.
    children: list[int] = field(default_factory=list)

    @property
    def lasting_kib(self) -> list[int]:
        """Of the daemon and its network process. The other children come and go with the work, by whole processes."""
        return [daemon + network for daemon, network, _ in self.parts_kib]

    @property
    def memory_kib(self) -> list[int]:
        return [sum(parts) for parts in self.parts_kib]


class Soak:
    def __init__(self, nodes: Cluster, seed: int, say: Say) -> None:
        self.nodes, self.seed, self.say = nodes, seed, say
        self.samples = {node: Samples() for node in nodes.lab.nodes}
        self.watch = Watch(nodes)
        self._began_s = time.monotonic()

    def run(self, moves: int) -> None:
        random = Random(self.seed)
        running = [jobs.draw(kind, self.nodes, random) for kind in (jobs.Single.kind, jobs.Nccl.kind)]
        for job in running:
            job.await_steps()
            self.watch.add(job)
        self.watch.start()
        try:
            for number in range(1, moves + 1):
                job = random.choice(running)
                rank = random.randrange(len(job.ranks))
                (source,) = job.places(rank)
                target = random.choice([node for node in self.nodes.lab.nodes if node != source])
                self.nodes.move(job.ranks[rank], target, rank=rank)
                self.watch.check()
                until("all moves to be settled", lambda: not unsettled(self.nodes))
                self._measure()
                if number % 25 == 0:
                    last = {node: one.descriptors[-1] for node, one in self.samples.items()}
                    self.say(f"move {number}: descriptors {last}")
        finally:
            self.watch.stop()
        for job in running:
            job.end()

    def _measure(self) -> None:
        for node, samples in self.samples.items():
            daemon = self.nodes.lab.daemon_pid(node)
            assert daemon is not None, self.nodes.logs()
            pids = [daemon, *processes.children(daemon)]
            descriptors, parts_kib, children = 0, [0, 0, 0], 0
            for pid in pids:
                try:
                    descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
                    part = 0 if pid == daemon else 1 if b"snapshotd.network.process" in _words(pid) else 2
                    parts_kib[part] += _private_kib(pid)
                    children += part == 2
                except (FileNotFoundError, ProcessLookupError):
                    continue  # a child that has done its work
            samples.descriptors.append(descriptors)
            samples.parts_kib.append((parts_kib[0], parts_kib[1], parts_kib[2]))
            samples.children.append(children)

    # ---------------------------------------------------------------- the result

    def growth(self) -> list[str]:
        """What grew after the first moves, though it must not."""
        found = []
        for node, samples in self.samples.items():
            if len(samples.descriptors) < WARM_UP + WINDOW:
                continue
            for what, values in (("descriptors", samples.descriptors), ("other children", samples.children)):
                most, least = max(values[:WARM_UP]), min(values[-WINDOW:])
                if least > most:
                    found.append(f"{what} of {node}: at most {most} at first, at least {least} at the end")
            early, late = _windows(samples.lasting_kib)
            if statistics.median(late) > statistics.median(early) * (1 + MEMORY_GROWTH):
                kib = statistics.median(early), statistics.median(late)
                found.append(f"memory of {node}: {kib[0] / 1024:.1f} MiB at first, {kib[1] / 1024:.1f} MiB at the end")
        return found

    def table(self) -> str:
        lines = [f"{'node':10}  moves  descriptors: at {WARM_UP}  at the end  memory (MiB): at {WARM_UP}  at the end"]
        for node, samples in self.samples.items():
            if not samples.descriptors:
                continue
            at = min(WARM_UP, len(samples.descriptors)) - 1
            lines.append(
                f"{node:10}  {len(samples.descriptors):5}  {samples.descriptors[at]:18}  {samples.descriptors[-1]:10}"
                f"  {samples.memory_kib[at] / 1024:19.1f}  {samples.memory_kib[-1] / 1024:10.1f}"
            )
            lines += [f"  at {at + 1}: {self._parts(samples, at)}", f"  at the end: {self._parts(samples, -1)}"]
        lines += self.growth() or ["nothing has grown" if self._enough() else f"fewer than {WARM_UP + WINDOW} moves"]
        return "\n".join([*lines, f"seed {self.seed}, {(time.monotonic() - self._began_s) / 60:.1f} minutes"])

    @staticmethod
    def _parts(samples: Samples, place: int) -> str:
        daemon, network, others = (kib / 1024 for kib in samples.parts_kib[place])
        children = samples.children[place]
        return f"daemon {daemon:.1f}, network process {network:.1f}, {children} other children {others:.1f} MiB"

    def _enough(self) -> bool:
        return all(len(samples.descriptors) >= WARM_UP + WINDOW for samples in self.samples.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "growth": self.growth(),
            "nodes": {
                node: {"descriptors": one.descriptors, "memory_kib": one.memory_kib, "children": one.children}
                for node, one in self.samples.items()
            },
        }


def _windows(values: list[int]) -> tuple[list[int], list[int]]:
    return values[WARM_UP - WINDOW : WARM_UP], values[-WINDOW:]


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _private_kib(pid: int) -> int:
    """Memory that no other process has, so that the other processes on this machine do not count."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
