"""Translates between the gates' reports, which count by membership, and `cut.py`, which counts by process.

A gate counts per communicator and member: "member 3 of this communicator sent five times to member 0". The cut counts per
process, because a process is what runs and waits. This file combines the memberships that all processes report of
themselves. It is pure: no I/O, no clock.

Invariant: nothing is assumed. A send to a member that no process has reported to be does not count until one has. Its
communicator lacks a member until then, so no cut is reached without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from migrator.quiesce.cut import Channel, Counts, Permission, Report
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


class Membership:
    """Which process is which member of every communicator. A process can be several members of one communicator.

    It only grows: what a process has reported of itself stays true until it ends, and then no cut is reached.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}  # (communicator, member) → number of the process
        self.members: dict[tuple[str, int], tuple[int, ...]] = {}  # (communicator, number of a process) → its members
        self.sizes: dict[str, int] = {}  # number of members of each communicator
        self.aborted: set[str] = set()  # communicators whose counts no longer mean anything
        self.version = 0  # changes with everything above
        self._known: Counter[str] = Counter()  # members of each communicator that are known
        self._processes: dict[str, tuple[int | None, ...]] = {}
        # By process: which communicators it had, and how many had ended, when everything about them was known. As long as
        # both are equal there is nothing to add.
        self._added: dict[int, tuple[list[str], int]] = {}

    @classmethod
    def gather(cls, reports: Iterable[ProcessReport], number: Callable[[Process], int]) -> Membership:
        made = cls()
        for report in reports:
            made.add(report, number(report.process))
        return made

    def add(self, report: ProcessReport, me: int) -> None:
        gate = report.gate
        known = [comm.id for comm in gate.communicators], len(gate.ended)
        if self._added.get(me) == known:
            return
        unknown = False
        for comm in report.counted():
            name, rank = comm.id, comm.rank
            if comm.state == "aborted" and name not in self.aborted:
                self.aborted.add(name)
                self.version += 1
            if comm.nranks <= 0 or rank < 0:
                unknown = True
            elif self.numbers.get((name, rank)) != me:
                self._known[name] += (name, rank) not in self.numbers
                self.numbers[name, rank] = me
                self.members[name, me] = (*self.members.get((name, me), ()), rank)
                self.sizes[name] = comm.nranks
                self._processes.pop(name, None)
                self.version += 1
        if not unknown:
            self._added[me] = known

    def unknown(self, comm: str) -> int:
        """How many members of the communicator no process has reported to be."""
        return self.sizes.get(comm, 1) - self._known[comm]

    def processes(self, comm: str) -> tuple[int | None, ...]:
        """The same object as long as it is the same, so that comparing it costs nothing."""
        if comm not in self._processes:
            self._processes[comm] = tuple(self.numbers.get((comm, member)) for member in range(self.sizes[comm]))
        return self._processes[comm]

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


def ahead_of_itself(report: ProcessReport, membership: Membership) -> Counts:
    """The collectives that the furthest member has launched, where a process has several: it counts as its last one."""
    counted = list(report.counted())
    if len({comm.id for comm in counted}) == len(counted):
        return {}
    highest: dict[Channel, int] = {}
    for comm in counted:
        if comm.id not in membership.aborted:
            channel = Channel(comm.id)
            highest[channel] = max(highest.get(channel, 0), comm.collectives)
    return highest


def report_for_cut(report: ProcessReport, me: int, membership: Membership) -> Report:
    """As if no thread were on its way to the gate."""
    launched: dict[Channel, int] = {}
    users: dict[str, frozenset[int]] = {}
    members: dict[str, tuple[int | None, ...]] = {}
    here = len(report.gate.communicators)
    for index, comm in enumerate(report.counted()):
        name = comm.id
        if index < here:
            users[name] = users.get(name, frozenset()).union(comm.users)
        if name in membership.sizes:
            members[name] = membership.processes(name)
        if name in membership.aborted:
            continue
        channel, count = Channel(name), comm.collectives
        launched[channel] = min(launched.get(channel, count), count)
        for kind, counts in ((pb.ChannelCount.SEND, comm.sent), (pb.ChannelCount.RECEIVE, comm.received)):
            for member in counts:
                if (between := membership.channel(me, name, kind, member)) is not None:
                    launched[between] = launched.get(between, 0) + counts[member]
    return Report(
        launched=launched,
        held={waiting.thread: _group(waiting.group, me, membership) for waiting in report.gate.waiting},
        members=members,
        users=users,
        passed=report.gate.passed if report.gate.HasField("passed") else None,
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


class Rows(NamedTuple):
    """What the gate of one process is told: rows of (communicator, kind, member, count), sorted."""

    targets: tuple[tuple[str, pb.ChannelCount.Kind.ValueType, int, int], ...]
    permissions: tuple[Permission, ...]


def rows_for(
    targets: Counts,
    permissions: Mapping[int, tuple[Permission, ...]],
    everyone: Collection[int],
    membership: Membership,
) -> dict[int, Rows]:
    """The targets and permissions that the gate of each process needs."""
    found: dict[int, list[tuple[str, pb.ChannelCount.Kind.ValueType, int, int]]] = {me: [] for me in everyone}
    for (comm, pair), count in targets.items():
        if pair is None:
            row = (comm, pb.ChannelCount.COLLECTIVE, -1, count)
            # A process that has not said what it is may be a member that is not known.
            members = everyone if membership.unknown(comm) else set(membership.processes(comm))
            for me in members:
                if me in found:
                    found[me].append(row)
            continue
        for me, other, kind in ((pair[0], pair[1], pb.ChannelCount.SEND), (pair[1], pair[0], pb.ChannelCount.RECEIVE)):
            if me in found:
                found[me] += [(comm, kind, member, count) for member in membership.members.get((comm, other), ())]
    return {me: Rows(tuple(sorted(rows)), permissions.get(me, ())) for me, rows in found.items()}


def to_proto(process: Process, me: int, rows: Rows, membership: Membership) -> pb.ProcessTargets:
    """Permissions for channels whose other end is not known are left out; there is none in a correct cut."""
    made = pb.ProcessTargets(rank_uid=process.rank_uid, pid=process.pid)
    for comm, kind, peer, count in rows.targets:
        made.targets.add(communicator=comm, kind=kind, peer=peer, count=count)
    for permission in rows.permissions:
        for until in _as_counted(permission, me, membership):
            made.permissions.add(thread=permission.thread or 0, until=until, passed=permission.passed)
    return made


def _as_counted(permission: Permission, me: int, membership: Membership) -> Iterator[pb.ChannelCount]:
    """The channel of a permission as the gate of this process counts it."""
    comm, pair = permission.channel
    if pair is None:
        yield pb.ChannelCount(communicator=comm, kind=pb.ChannelCount.COLLECTIVE, peer=-1, count=permission.until)
        return
    kind, other = (pb.ChannelCount.SEND, pair[1]) if pair[0] == me else (pb.ChannelCount.RECEIVE, pair[0])
    for member in membership.members.get((comm, other), ()):
        yield pb.ChannelCount(communicator=comm, kind=kind, peer=member, count=permission.until)
