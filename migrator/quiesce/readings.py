"""What the gates of a job say, as `migrator/quiesce/cut.py` computes with it; and its targets, as each gate is told them.

A gate counts by seat: member 3 of this communicator sent five times to member 0. The cut counts by process, since a process
is what runs and waits. Who sits where is put together here, from what every process says of its own seats. Pure: no I/O
and no clock.

Invariant: nothing is made up. A send to a seat that nobody has taken yet does not count until somebody has: its
communicator is short of a member all the while, so no cut is reached without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from migrator.quiesce.cut import Channel, Counts, Report
from snapshotd.api.errors import Damaged, Refused

#: Processes of a rank beside its first are numbered from here on: no rank has so high a number.
BESIDE = 1 << 24


class Process(NamedTuple):
    """One process of a job, by the rank that it belongs to and its pid inside that rank."""

    rank_uid: str
    pid: int


@dataclass(frozen=True)
class Reading:
    """What one process's gate says: the shim's own words, see shim/lib/nccl/report.c."""

    process: Process
    rank: int
    node: str
    said: Mapping[str, Any]

    @classmethod
    def parse(cls, process: Process, rank: int, node: str, text: str) -> Reading:
        try:
            said = json.loads(text)
        except ValueError as error:
            said = error
        if not isinstance(said, dict) or not isinstance(said.get("comms"), list):
            raise Damaged(
                f"{node} tells of process {process.pid} of rank {rank} what no gate says: {text[:80]!r}",
                remedy="run the same version of snapshotd and migrator everywhere",
            )
        return cls(process, rank, node, said)

    @property
    def comms(self) -> list[Mapping[str, Any]]:
        return list(self.said["comms"])

    def counted(self) -> Iterator[Mapping[str, Any]]:
        """Every communicator that it has, or had and destroyed."""
        yield from self.said["comms"]
        yield from self.said.get("ended", ())

    @property
    def held(self) -> dict[int, list[tuple[str, str, int, int]]]:
        return {entry["thread"]: [tuple(row) for row in entry["group"]] for entry in self.said.get("held", ())}

    @property
    def not_held(self) -> frozenset[int]:
        """Threads that have used NCCL and are not at the gate: in a call of it, or in code of the job."""
        seen = {entry["thread"] for entry in self.said.get("calling", ())}
        return frozenset(seen.union(*(comm.get("users", ()) for comm in self.comms)) - self.held.keys())


class Numbers:
    """The number by which the cut knows each process: its rank's, as far as a rank has one process that uses NCCL."""

    def __init__(self) -> None:
        self._numbers: dict[Process, int] = {}
        self._names: dict[int, str] = {}

    def __call__(self, process: Process) -> int:
        return self._numbers[process]

    def take(self, readings: Collection[Reading]) -> None:
        for reading in sorted(readings, key=lambda reading: (reading.rank, reading.process)):
            if reading.process not in self._numbers:
                number = reading.rank if reading.rank not in self._names else BESIDE + len(self._numbers)
                self._numbers[reading.process] = number
                self._names[number] = f"process {reading.process.pid} of rank {reading.rank}"

    def in_words(self, reason: str) -> str:
        """A reason of the cut, with processes named that are not the first of their rank."""

        def name(found: re.Match[str]) -> str:
            number = int(found[1])
            return self._names.get(number, found[0]) if number >= BESIDE else found[0]

        return re.sub(r"\brank (\d+)", name, reason)


@dataclass(frozen=True)
class Seats:
    """Who sits where in every communicator."""

    at: Mapping[tuple[str, int], int]  # (communicator, seat) → number
    of: Mapping[tuple[str, int], tuple[int, ...]]  # (communicator, number) → its seats
    counts: Mapping[str, int]  # how many seats each communicator has
    aborted: frozenset[str]  # its counts mean nothing any more

    @classmethod
    def gather(cls, readings: Collection[Reading], number: Callable[[Process], int]) -> Seats:
        at: dict[tuple[str, int], int] = {}
        of: dict[tuple[str, int], tuple[int, ...]] = {}
        counts: dict[str, int] = {}
        aborted = set()
        for reading in readings:
            me = number(reading.process)
            for comm in reading.counted():
                if comm["state"] == "aborted":
                    aborted.add(comm["id"])
                if comm["nranks"] > 0 and comm["rank"] >= 0:
                    at[comm["id"], comm["rank"]] = me
                    of[comm["id"], me] = (*of.get((comm["id"], me), ()), comm["rank"])
                    counts[comm["id"]] = comm["nranks"]
        return cls(at, of, counts, frozenset(aborted))

    def empty(self, comm: str) -> int:
        """How many of its seats nobody is known to have."""
        return sum((comm, seat) not in self.at for seat in range(self.counts.get(comm, 1)))

    def members(self, comm: str) -> tuple[int | None, ...]:
        return tuple(self.at.get((comm, seat)) for seat in range(self.counts[comm]))

    def channel(self, me: int, comm: str, kind: str, seat: int) -> Channel | None:
        """None: with a seat that nobody has taken yet, or what counts as a send to oneself."""
        if kind == "c":
            return Channel(comm)
        other = self.at.get((comm, seat))
        if other is None or (kind == "r" and other == me):
            return None
        if len(self.of.get((comm, me), ())) > 1 or len(self.of.get((comm, other), ())) > 1:
            raise Refused(
                f"communicator {comm} sends between members of which several are one process: not supported",
                remedy="use one process per GPU",
            )
        return Channel(comm, (me, other) if kind == "s" else (other, me))


def floor(readings: Collection[Reading], seats: Seats) -> Counts:
    """What the furthest seat of any process has launched: a process with several seats stands where its last one is."""
    highest: dict[Channel, int] = {}
    for reading in readings:
        for comm in reading.counted():
            if comm["id"] in seats.aborted:
                continue
            channel = Channel(comm["id"])
            highest[channel] = max(highest.get(channel, 0), comm["collectives"])
    return highest


def report(reading: Reading, me: int, seats: Seats, *, idle: bool) -> Report:
    """`idle`: what does not wait at the gate has not moved for so long that it is not waited for."""
    launched: dict[Channel, int] = {}
    for comm in reading.counted():
        if comm["id"] in seats.aborted:
            continue
        channel = Channel(comm["id"])
        launched[channel] = min(launched.get(channel, comm["collectives"]), comm["collectives"])
        for kind, counts in (("s", comm["sent"]), ("r", comm["received"])):
            for seat, count in counts.items():
                if (between := seats.channel(me, comm["id"], kind, int(seat))) is not None:
                    launched[between] = launched.get(between, 0) + count
    users: dict[str, frozenset[int]] = {}
    for comm in reading.comms:
        users[comm["id"]] = users.get(comm["id"], frozenset()) | frozenset(comm.get("users", ()))
    return Report(
        launched=launched,
        held={thread: _group(rows, me, seats) for thread, rows in reading.held.items()},
        members={
            comm["id"]: tuple(me if number == me else None for number in seats.members(comm["id"]))
            for comm in reading.counted()
            if comm["id"] in seats.counts
        },
        users=users,
        running=frozenset() if idle else reading.not_held,
    )


def _group(rows: list[tuple[str, str, int, int]], me: int, seats: Seats) -> Counts:
    group: dict[Channel, int] = {}
    for comm, kind, peer, count in rows:
        if (channel := seats.channel(me, comm, kind, peer)) is not None:
            group[channel] = group.get(channel, 0) + count
    # A process with several seats launches a collective at each of them; each seat counts its own.
    return {
        channel: -(-count // max(1, len(seats.of.get((channel.comm, me), ())))) if channel.pair is None else count
        for channel, count in group.items()
    }


def lines(targets: Counts, me: int, seats: Seats) -> str:
    """The targets that one gate has to know, as it reads them: `ID c|s|r PEER COUNT`."""
    told = []
    for (comm, pair), count in targets.items():
        if pair is None:
            if (comm, me) in seats.of or seats.empty(comm):
                told.append(f"{comm} c -1 {count}")
        elif me in pair:
            kind, other = ("s", pair[1]) if pair[0] == me else ("r", pair[0])
            told += [f"{comm} {kind} {seat} {count}" for seat in seats.of.get((comm, other), ())]
    return "\n".join(sorted(told))
