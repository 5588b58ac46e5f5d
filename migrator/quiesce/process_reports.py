"""Translates between the gates' reports, which count by membership, and `cut.py`, which counts by process.

A gate counts per communicator and member: "member 3 of this communicator sent five times to member 0". The cut counts per
process, because a process is what runs and waits. This file combines the memberships that all processes report of
themselves. It is pure: no I/O, no clock.

Invariant: nothing is assumed. A send to a member that no process has reported to be does not count until one has. Its
communicator lacks a member until then, so no cut is reached without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from migrator.quiesce.cut import Channel, Counts, Report
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused

#: Numbers for processes of a rank other than its first start here; no rank has such a high number.
FIRST_EXTRA_NUMBER = 1 << 24


class Process(NamedTuple):
    """One process of a job: the rank that it belongs to, and its pid inside that rank."""

    rank_uid: str
    pid: int


@dataclass(frozen=True)
class ProcessReport:
    """What the gate of one process reports, and the node that it runs on."""

    process: Process
    rank: int
    node: str
    gate: pb.ProcessGate

    @classmethod
    def of(cls, node: str, gate: pb.ProcessGate) -> ProcessReport:
        return cls(Process(gate.rank_uid, gate.pid), gate.rank, node, gate)

    def counted(self) -> Iterator[pb.Communicator]:
        """Every communicator that it has, or had and destroyed."""
        yield from self.gate.communicators
        yield from self.gate.ended

    @property
    def not_waiting(self) -> frozenset[int]:
        """Threads that have used NCCL and are not at the gate: inside an NCCL call, or in code of the job."""
        seen = set(self.gate.calling).union(*(comm.users for comm in self.gate.communicators))
        return frozenset(seen - {waiting.thread for waiting in self.gate.waiting})


class Numbers:
    """The number by which the cut identifies each process: its rank's number for the rank's first process with a gate."""

    def __init__(self) -> None:
        self._numbers: dict[Process, int] = {}
        self._names: dict[int, str] = {}

    def __call__(self, process: Process) -> int:
        return self._numbers[process]

    def add(self, reports: Collection[ProcessReport]) -> None:
        for report in sorted(reports, key=lambda report: (report.rank, report.process)):
            if report.process not in self._numbers:
                number = report.rank if report.rank not in self._names else FIRST_EXTRA_NUMBER + len(self._numbers)
                self._numbers[report.process] = number
                self._names[number] = f"process {report.process.pid} of rank {report.rank}"

    def describe(self, reason: str) -> str:
        """A reason of the cut; processes that are not the first of their rank are named by pid and rank."""

        def name(found: re.Match[str]) -> str:
            number = int(found[1])
            return self._names.get(number, found[0]) if number >= FIRST_EXTRA_NUMBER else found[0]

        return re.sub(r"\brank (\d+)", name, reason)


@dataclass(frozen=True)
class Membership:
    """Which process is which member of every communicator. A process can be several members of one communicator."""

    numbers: Mapping[tuple[str, int], int]  # (communicator, member) → number of the process
    members: Mapping[tuple[str, int], tuple[int, ...]]  # (communicator, number of a process) → its members
    sizes: Mapping[str, int]  # number of members of each communicator
    aborted: frozenset[str]  # communicators whose counts no longer mean anything

    @classmethod
    def gather(cls, reports: Collection[ProcessReport], number: Callable[[Process], int]) -> Membership:
        numbers: dict[tuple[str, int], int] = {}
        members: dict[tuple[str, int], tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        aborted = set()
        for report in reports:
            me = number(report.process)
            for comm in report.counted():
                if comm.state == "aborted":
                    aborted.add(comm.id)
                if comm.nranks > 0 and comm.rank >= 0:
                    numbers[comm.id, comm.rank] = me
                    members[comm.id, me] = (*members.get((comm.id, me), ()), comm.rank)
                    sizes[comm.id] = comm.nranks
        return cls(numbers, members, sizes, frozenset(aborted))

    def unknown(self, comm: str) -> int:
        """How many members of the communicator no process has reported to be."""
        return sum((comm, member) not in self.numbers for member in range(self.sizes.get(comm, 1)))

    def processes(self, comm: str) -> tuple[int | None, ...]:
        return tuple(self.numbers.get((comm, member)) for member in range(self.sizes[comm]))

    def channel(self, me: int, comm: str, kind: pb.ChannelCount.Kind.ValueType, member: int) -> Channel | None:
        """None: a channel with a member that no process has reported to be, or the receive of a send to oneself."""
        if kind == pb.ChannelCount.COLLECTIVE:
            return Channel(comm)
        other = self.numbers.get((comm, member))
        if other is None or (kind == pb.ChannelCount.RECEIVE and other == me):
            return None
        if len(self.members.get((comm, me), ())) > 1 or len(self.members.get((comm, other), ())) > 1:
            raise Refused(
                f"communicator {comm} sends between members of which several are one process: not supported",
                remedy="use one process per GPU",
            )
        return Channel(comm, (me, other) if kind == pb.ChannelCount.SEND else (other, me))


def highest_collectives(reports: Collection[ProcessReport], membership: Membership) -> Counts:
    """The collectives that the furthest member has launched. A process with several members counts as its last one."""
    highest: dict[Channel, int] = {}
    for report in reports:
        for comm in report.counted():
            if comm.id in membership.aborted:
                continue
            channel = Channel(comm.id)
            highest[channel] = max(highest.get(channel, 0), comm.collectives)
    return highest


def report_for_cut(report: ProcessReport, me: int, membership: Membership, *, idle: bool) -> Report:
    """`idle`: no count has changed for so long that threads outside the gate are not expected to arrive at it."""
    launched: dict[Channel, int] = {}
    for comm in report.counted():
        if comm.id in membership.aborted:
            continue
        channel = Channel(comm.id)
        launched[channel] = min(launched.get(channel, comm.collectives), comm.collectives)
        for kind, counts in ((pb.ChannelCount.SEND, comm.sent), (pb.ChannelCount.RECEIVE, comm.received)):
            for member, count in counts.items():
                if (between := membership.channel(me, comm.id, kind, member)) is not None:
                    launched[between] = launched.get(between, 0) + count
    users: dict[str, frozenset[int]] = {}
    for comm in report.gate.communicators:
        users[comm.id] = users.get(comm.id, frozenset()) | frozenset(comm.users)
    return Report(
        launched=launched,
        held={waiting.thread: _group(waiting.group, me, membership) for waiting in report.gate.waiting},
        members={
            comm.id: tuple(me if number == me else None for number in membership.processes(comm.id))
            for comm in report.counted()
            if comm.id in membership.sizes
        },
        users=users,
        running=frozenset() if idle else report.not_waiting,
    )


def _group(rows: Iterable[pb.ChannelCount], me: int, membership: Membership) -> Counts:
    group: dict[Channel, int] = {}
    for row in rows:
        if (channel := membership.channel(me, row.communicator, row.kind, row.peer)) is not None:
            group[channel] = group.get(channel, 0) + row.count
    # A process with several members launches a collective as each of them; each member counts its own.
    return {
        channel: -(-count // max(1, len(membership.members.get((channel.comm, me), ()))))
        if channel.pair is None
        else count
        for channel, count in group.items()
    }


def targets_of(targets: Counts, me: int, membership: Membership) -> list[pb.ChannelCount]:
    """The targets that the gate of one process needs, sorted."""
    found: list[tuple[str, pb.ChannelCount.Kind.ValueType, int, int]] = []
    for (comm, pair), count in targets.items():
        if pair is None:
            if (comm, me) in membership.members or membership.unknown(comm):
                found.append((comm, pb.ChannelCount.COLLECTIVE, -1, count))
        elif me in pair:
            kind, other = (pb.ChannelCount.SEND, pair[1]) if pair[0] == me else (pb.ChannelCount.RECEIVE, pair[0])
            found += [(comm, kind, member, count) for member in membership.members.get((comm, other), ())]
    return [
        pb.ChannelCount(communicator=comm, kind=kind, peer=peer, count=count)
        for comm, kind, peer, count in sorted(found)
    ]
