"""Reads how far one rank has come. Everything here blocks: call it in a thread.

A rank that uses NCCL is measured by its operations: its connections carry heartbeats even while it hangs. A rank without
communicators is measured by the bytes of its connections, and one without either by the time that its processes run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Timeout
from snapshotd.inprocess import counts
from snapshotd.inprocess.counts import Counts, Membership
from snapshotd.net import traffic
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from snapshotd.progress import schedule

#: Processes of a rank that are searched for communicators; the others are its helpers.
_PROCESSES_MAX = 64
#: How often a rank is searched for new communicators, because reading the mappings of a process takes a millisecond. One that
#: has none is searched less and less often, from the first to the last of these times.
_SEARCH_S, _SEARCH_MOST_S = 5.0, 160.0
_KNOWN_S = 60.0
#: How long one is left alone whose memory did not answer: at first, and at most.
_SILENT_S, _SILENT_MOST_S = 60.0, 3600.0

#: Communicator and member in it.
Key = tuple[int, int]


@dataclass
class Rank:
    """What was found of one rank. Used by one thread at a time."""

    group: Cgroup
    found: dict[Process, Counts] = field(default_factory=dict)
    search_at_s: float = float("-inf")  # monotonic: when to search the next time
    wait_s: float = _SEARCH_S / 2
    silent_s: float = 0.0  # how long it was left alone because its memory did not answer

    def measure(self, now_s: float) -> tuple[pb.RankProgress.Measure.ValueType, int]:
        """The best measure of its progress that there is."""
        pids = self.group.pids()
        self._search(pids, now_s)
        operations = 0
        for one in list(self.found.values()):
            with self._unless_lost(one):
                self.found[one.process] = new = one.renewed()
                operations += new.operations()
        if self.found:
            return pb.RankProgress.NCCL, operations
        carried = traffic.carried_bytes(pids[:_PROCESSES_MAX])
        if carried is not None:
            return pb.RankProgress.TCP, carried
        return pb.RankProgress.CPU, _cpu_us(self.group)

    def collectives(self) -> dict[Key, Membership]:
        """Of every communicator that it is a member of."""
        made: dict[Key, Membership] = {}
        for one in list(self.found.values()):
            with self._unless_lost(one):
                made.update({(each.comm, each.member): each for each in one.read()})
        return made

    def _search(self, pids: list[int], now_s: float) -> None:
        if now_s < self.search_at_s:
            return
        try:
            made = [(process, counts.find(process)) for process in _processes(pids[:_PROCESSES_MAX])]
        except Timeout:
            # Every attempt costs a child, which may not even be possible to kill (snapshotd/proc/foreign_memory.py).
            self.found = {}
            self.silent_s = min(max(2 * self.silent_s, _SILENT_S), _SILENT_MOST_S)
            self.search_at_s = now_s + self.silent_s
            return
        self.found = {process: one for process, one in made if one is not None}
        self.wait_s = _SEARCH_S if self.found else min(2 * self.wait_s, _SEARCH_MOST_S)
        self.search_at_s = now_s + (_KNOWN_S if self.found else self.wait_s)

    @contextlib.contextmanager
    def _unless_lost(self, one: Counts) -> Iterator[None]:
        """Forgets a process that cannot be read any more; it is searched for again."""
        try:
            yield
        except (OSError, ValueError, SnapshotError):
            self.found.pop(one.process, None)
            self.search_at_s = float("-inf")


@dataclass(frozen=True)
class Reading:
    nranks: int
    early: int
    late: int


def read_twice(ranks: dict[str, Rank], at_unix_s: float) -> dict[str, dict[Key, Reading]]:
    """A reading of these ranks (schedule.py), by uid. Empty if it was too late for its first part."""
    early = {uid: rank.collectives() for uid, rank in ranks.items()}
    if time.time() > at_unix_s + schedule.EARLY_S:
        return {}
    time.sleep(min(schedule.LATE_S, max(0.0, at_unix_s + schedule.LATE_S - time.time())))
    made: dict[str, dict[Key, Reading]] = {}
    for uid, rank in ranks.items():
        late = rank.collectives()
        made[uid] = {
            key: Reading(one.nranks, one.collectives, late[key].collectives)
            for key, one in early[uid].items()
            if key in late and late[key].nranks == one.nranks
        }
    return made


def _processes(pids: Iterable[int]) -> list[Process]:
    found = []
    for pid in pids:
        try:
            found.append(Process.of(pid))
        except OSError:
            continue
    return found


def _cpu_us(group: Cgroup) -> int:
    """0 if the node does not count it."""
    try:
        lines = (group.path / "cpu.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("usage_usec ")), 0)
