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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from migrator.quiesce.cut import Channel, Counts, Permission, Report
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused

_SEND, _RECEIVE = pb.ChannelCount.SEND, pb.ChannelCount.RECEIVE
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

    def not_waiting(self, shown: Report) -> frozenset[int]:
        """Threads that have used NCCL and are not at the gate: inside an NCCL call, or in code of the job."""
        return frozenset(self.gate.calling).union(*shown.users.values()).difference(shown.held)


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
        self._collectives: dict[str, Channel] = {}
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

    def collectives(self, comm: str) -> Channel:
        """Always the same object, because making one takes longer than finding it."""
        if comm not in self._collectives:
            self._collectives[comm] = Channel(comm)
        return self._collectives[comm]

    def channel(self, me: int, comm: str, kind: pb.ChannelCount.Kind.ValueType, member: int) -> Channel | None:
        """None: a channel with a member that no process has reported to be, or the receive of a send to oneself."""
        if kind == pb.ChannelCount.COLLECTIVE:
            return self.collectives(comm)
        other = self.numbers.get((comm, member))
        if other is None or (kind == pb.ChannelCount.RECEIVE and other == me):
            return None
        if len(self.members.get((comm, me), ())) > 1 or len(self.members.get((comm, other), ())) > 1:
            raise Refused(
                f"communicator {comm} sends between members of which several are one process: not supported",
                remedy="use one process per GPU",
            )
        return Channel(comm, (me, other) if kind == pb.ChannelCount.SEND else (other, me))


def ahead_of_itself(report: ProcessReport, shown: Report, membership: Membership) -> Counts:
    """The collectives that the furthest member has launched, where a process has several: it counts as its last one."""
    if len(shown.users) == len(report.gate.communicators) and not report.gate.ended:
        return {}  # it is one member of each
    counted = list(report.counted())
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
    gate, aborted = report.gate, membership.aborted
    # This is most of the driver's work: reading a field of a message takes longer than anything else here.
    for here, comms in ((True, gate.communicators), (False, gate.ended)):
        for comm in comms:
            name = comm.id
            if here:
                used = frozenset(comm.users[:])
                users[name] = users[name] | used if name in users else used
            if name in membership.sizes:
                members[name] = membership.processes(name)
            if name in aborted:
                continue
            channel, count = membership.collectives(name), comm.collectives
            if channel not in launched or count < launched[channel]:
                launched[channel] = count
            for kind, counts in ((_SEND, comm.sent), (_RECEIVE, comm.received)):
                if counts:
                    for member in counts:
                        if (between := membership.channel(me, name, kind, member)) is not None:
                            launched[between] = launched.get(between, 0) + counts[member]
    return Report(
        launched=launched,
        held={waiting.thread: _group(waiting.group, me, membership) for waiting in gate.waiting},
        members=members,
        users=users,
        passed=gate.passed if gate.HasField("passed") else None,
    )


def only_counts(before: pb.ProcessGate, now: pb.ProcessGate) -> list[pb.Communicator] | None:
    """The communicators whose counts or users have changed; None if others have come or gone, or have changed otherwise."""
    if len(before.communicators) != len(now.communicators) or before.ended != now.ended:
        return None
    changed = []
    for old, new in zip(before.communicators, now.communicators, strict=True):
        if old != new:
            if (old.id, old.rank, old.nranks, old.state) != (new.id, new.rank, new.nranks, new.state):
                return None
            changed.append(new)
    return changed


def updated(
    before: Report, report: ProcessReport, changed: Iterable[pb.Communicator], me: int, membership: Membership
) -> Report:
    """What `report_for_cut` returns, from what it returned before, where only these counts have changed, the process is one
    member of each communicator, none has ended, and the membership is the same. Most reports are such; this is quicker."""
    launched, users, gate = dict(before.launched), before.users, report.gate
    for comm in changed:
        name = comm.id
        if (used := frozenset(comm.users[:])) != users[name]:
            users = {**users, name: used}
        if name in membership.aborted:
            continue
        launched[membership.collectives(name)] = comm.collectives
        for kind, counts in ((_SEND, comm.sent), (_RECEIVE, comm.received)):
            if counts:
                for member in counts:
                    if (between := membership.channel(me, name, kind, member)) is not None:
                        launched[between] = counts[member]
    return Report(
        launched=launched,
        held={waiting.thread: _group(waiting.group, me, membership) for waiting in gate.waiting},
        members=before.members,
        users=users,
        passed=gate.passed if gate.HasField("passed") else None,
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


#: (communicator, kind, member, count)
Row = tuple[str, pb.ChannelCount.Kind.ValueType, int, int]


class Rows(NamedTuple):
    """What the gate of one process is told; sorted."""

    targets: tuple[Row, ...] = ()
    permissions: tuple[Permission, ...] = ()

    def suffices(self, wanted: Rows) -> bool:
        """Whether a gate that was told this needs not be told `wanted`: what it has reached since lets nothing pass."""
        return set(wanted.targets) <= set(self.targets) and set(wanted.permissions) <= set(self.permissions)

    def names(self, comms: Collection[str]) -> bool:
        return any(row[0] in comms for row in self.targets) or any(
            one.channel.comm in comms for one in self.permissions
        )


def rows_for(me: int, wanted: Counts, membership: Membership) -> tuple[Row, ...]:
    """The targets that the gate of one process needs, as it counts."""
    found: list[Row] = []
    for (comm, pair), count in wanted.items():
        if pair is None:
            found.append((comm, pb.ChannelCount.COLLECTIVE, -1, count))
            continue
        kind, other = (pb.ChannelCount.SEND, pair[1]) if pair[0] == me else (pb.ChannelCount.RECEIVE, pair[0])
        found += [(comm, kind, member, count) for member in membership.members.get((comm, other), ())]
    return tuple(sorted(found))


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
