"""Computes a consistent cut of an NCCL job: how far each rank may run, given the operations that the gates have counted.

Invariant: at the cut all members of every channel have launched the same operations. So every launched operation can
finish, and no rank waits for an operation that the gate of another rank holds back. A **channel** is either the
collectives of one communicator (its members: all ranks of the communicator) or its sends from one rank to another (its
members: those two ranks). A **group** is what one thread launches as a unit, whole or not at all.

In each round the driver collects a `Report` per rank, calls `next_targets`, and sends `Cut.wanted` and `Cut.permissions` to
the gates. Wanted are the targets that a rank has not reached: no other lets anything pass. A rank that wants nothing and
has no permission stays where it is, so its last report is as good as a new one. A gate lets a thread pass if `may_launch`
or `is_permitted` holds. Targets only grow. The target of a channel is the largest number of operations that any member has
launched. A rank below a target has to run, which may take it through groups on other channels. These raise their targets in
turn, until no rank is behind. Only groups that an earlier step makes necessary may pass, so the fixpoint is the least cut.

**The order of a rank's program is not known here.** Suppose that rank r is behind on a channel, and that none of its
threads waits at the gate for the next operation of that channel. The candidates are the threads that have used the
communicator before, or, if there are none, all threads of the rank.
- A candidate is running: it will get there by itself. Wait.
- There is one candidate, and it waits with another group: that group comes first in its program, so it certainly has to
  pass, and so has every other group that it launches before the operation. It gets a `Permission` for all of them,
  because a round for each would take minutes where a rank is hundreds of groups behind.
- Several candidates wait, or one is idle and waits for another thread: a guess. All waiting threads that may lead to the
  operation pass with one group. Guesses are made only when the ranks that are behind make no progress: two equal rounds,
  none of their threads running, nothing certain left. From the second guess about a rank on, any of its threads may
  launch more groups until the rank has the operation, and each time `GROWTH` times as many: main and autograd threads
  take turns in each micro-batch.
As long as no thread takes over a communicator that it has never used, and `running` is correct, a cut without a guess is
the least, so the same start ends at the same cut however the steps of the ranks interleave. A cut with guesses is the
least, too, if at most one thread of a rank waits at a time and the idle ones wait for it, as main and autograd threads
do. Otherwise the cut may exceed the least by what the wrong threads launched. It is still consistent: **no hint in a
report (`users`, `running`) can make a cut wrong, only later than necessary**.

A dependency between ranks outside NCCL (a key of a store, a gloo barrier) is invisible here. A rank that waits there for
a rank at a closed gate never reaches the cut, and neither does one that is stuck in user code. The driver's time-out ends
the attempt, opens the gates and quotes `Cut.reason`; the next attempt begins elsewhere in the program. This file does no
I/O and reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Channel(NamedTuple):
    comm: str
    pair: tuple[int, int] | None = None  # (sender, receiver) as ranks of the job; None: the collectives

    def operation(self, number: int, rank: int) -> str:
        """The channel's operation with this number, as `rank` would call it."""
        if self.pair is None:
            return f"operation {number} of communicator {self.comm}"
        sender, receiver = self.pair
        end = f"send {number} to rank {receiver}" if rank == sender else f"receive {number} from rank {sender}"
        return f"{end} on communicator {self.comm}"


UNKNOWN_RANK = -1  # a member of a communicator that is none of the ranks with a report
Counts = Mapping[Channel, int]  # operations launched, targets, or what a group adds; a missing channel counts as 0


@dataclass(frozen=True)
class Report:
    """What one rank's gate knows. The gate is closed before the first round (empty targets let nothing pass), and a round
    starts only after every gate has received the targets of the previous round.

    An operation counts from the moment it passes the gate. Creating a communicator counts as the first of its collectives,
    and a split as a collective of the parent, because all members have to take part. A send of a rank to itself counts once,
    together with its receive. Operations of a communicator that has been destroyed still count.
    """

    launched: Counts
    held: Mapping[int, Counts] = field(default_factory=dict)  # by waiting thread: the group that it will launch
    # The ranks of each communicator that this rank has created, in the communicator's order; None: not known (yet).
    members: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    users: Mapping[str, frozenset[int]] = field(default_factory=dict)  # threads that have used each communicator
    # Threads that do not wait at the gate and may be on their way to it. A thread that has used no processor time for a
    # while counts as idle and is left out. So is a thread that spins for longer than the driver waits for it.
    running: frozenset[int] = frozenset()
    ended: bool = False  # this rank will launch no more operations
    passed: int | None = (
        0  # groups that have passed the closed gate; None: the gate is an older one, without permissions
    )


class Decision(StrEnum):
    RUN_ON = "run on"  # send the targets, then start another round
    REACHED = "reached"  # every rank stays where it is until it gets other targets
    NEVER = "never"  # give up now, because waiting does not help


class Why(StrEnum):
    """Why a rank has not reached a target; the most likely cause of a failed attempt first."""

    ENDED = "it has ended"
    SILENT = "it does not answer"
    USER_CODE = "it is in user code"
    HELD = "it waits at the gate"
    LET_ON = "it has just been let on"
    UNKNOWN_MEMBER = "it may be one of the members that have yet to create it"


class Permission(NamedTuple):
    """Lets threads of a rank launch whatever comes next, while the rank lacks an operation and `passed` is below a limit."""

    thread: int | None  # None: any
    channel: Channel
    until: int  # operations of the channel
    passed: int


class Behind(NamedTuple):
    rank: int
    channel: Channel
    target: int
    why: Why
    # Ranks that have not reached an operation that this rank has launched. Filled in for the first few entries only.
    waits_for: tuple[int, ...] = ()

    def __str__(self) -> str:
        others = ", ".join(map(str, self.waits_for))
        maybe = f", perhaps waiting for rank {others}" if others and self.why is Why.USER_CODE else ""
        who = "an unknown rank" if self.rank == UNKNOWN_RANK else f"rank {self.rank}"
        return f"{who} has not reached {self.channel.operation(self.target, self.rank)}: {self.why}{maybe}"


@dataclass(frozen=True)
class Cut:
    decision: Decision
    reason: str
    targets: Counts
    behind: tuple[Behind, ...]  # the ranks that have to run, the most likely cause of a delay first
    guesses: Mapping[int, int]  # how often each rank was let on by a guess so far; empty: the cut is the least
    reports: Mapping[int, Report]  # the input of this round; the next round compares, to detect progress
    permissions: Mapping[int, tuple[Permission, ...]] = field(default_factory=dict)  # by rank
    wanted: Mapping[int, Counts] = field(default_factory=dict)  # by rank: the targets that it has not reached
    members: Mapping[str, tuple[int | None, ...]] = field(
        default_factory=dict
    )  # of every communicator, as far as known

    def moving(self) -> set[int] | None:
        """The ranks that may launch something; None: perhaps one that has not reported."""
        return None if UNKNOWN_RANK in self.wanted else self.wanted.keys() | self.permissions.keys()


def may_launch(launched: Counts, targets: Counts, group: Counts) -> bool:
    """The gate's rule. One channel below its target is enough: another member is already committed to that operation, so
    the whole group is inside the cut. The targets of its other channels follow when the rank reports."""
    return any(launched.get(channel, 0) < targets.get(channel, 0) for channel in group)


def is_permitted(report: Report, thread: int, permissions: Iterable[Permission]) -> bool:
    """The gate's other rule, for a thread with any group."""
    return report.passed is not None and any(
        permission.thread in (None, thread)
        and report.passed < permission.passed
        and report.launched.get(permission.channel, 0) < permission.until
        for permission in permissions
    )


def next_targets(reports: Mapping[int, Report], last: Cut | None = None) -> Cut:
    """How far every rank may run, given this round's reports of all ranks and the cut computed in the last round."""
    targets = dict(last.targets) if last else {}
    before = last.reports if last else {}
    for rank, report in reports.items():
        if before.get(rank) is not report:
            _raise(targets, report.launched.items())
    guesses = last.guesses if last else {}
    members = last.members if last and _same_members(reports, before) else _members(reports)
    behind = _behind(reports, targets, members)
    if not behind:
        reason = "every rank has launched the same operations"
        return Cut(Decision.REACHED, reason, targets, (), guesses, reports, members=members)
    first, more = str(behind[0]), len(behind) - 1
    reason = f"{first} (and {more} more)" if more else first
    if behind[0].why is Why.ENDED:
        return Cut(Decision.NEVER, reason, targets, behind, guesses, reports, members=members)
    still = last is not None and _stands_still(reports, before, {late.rank for late in behind}, targets)
    certainty, let_on = _let_on(reports, targets, behind, still)
    permissions = _permissions(reports, last, certainty, let_on)
    raised: set[Channel] = set()
    for rank, thread in let_on:
        report = reports[rank]
        raised.update(report.held[thread])
        _raise(targets, ((channel, report.launched.get(channel, 0) + n) for channel, n in report.held[thread].items()))
    wanted = _wanted(reports, targets, members, behind, raised)
    if let_on and certainty is not Certainty.SURE:
        ranks = sorted({rank for rank, _ in let_on})
        # One about a rank that may be no member at all says nothing about the next one.
        more_often = int(certainty is Certainty.GUESS)
        guesses = {**guesses, **{rank: guesses.get(rank, 0) + more_often for rank in ranks}}
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (
            "" if len(ranks) <= _SHOWN else f" and {len(ranks) - _SHOWN} more"
        )
        reason += f"; nothing moves, so rank {shown} is let on by a guess"
    return Cut(Decision.RUN_ON, reason, targets, behind, guesses, reports, permissions, wanted, members)


def _wanted(
    reports: Mapping[int, Report],
    targets: Counts,
    members: Mapping[str, tuple[int | None, ...]],
    behind: Iterable[Behind],
    raised: Iterable[Channel],
) -> dict[int, dict[Channel, int]]:
    found: dict[int, dict[Channel, int]] = {}
    for late in behind:
        found.setdefault(late.rank, {})[late.channel] = targets[late.channel]
    for channel in raised:
        ranks = channel.pair or members.get(channel.comm, (None,))
        for rank in reports if None in ranks else ranks:
            if rank is not None and rank in reports and reports[rank].launched.get(channel, 0) < targets[channel]:
                found.setdefault(rank, {})[channel] = targets[channel]
    return found


#: How many groups a thread may launch until the next round at most, where it is certain that it has to.
SURE_GROUPS = 1000
#: How many times as many groups a rank may launch with each further guess about it, and how many at most.
GROWTH, MOST_GROUPS = 16, 4096
_SHOWN = 8


def _permissions(
    reports: Mapping[int, Report],
    last: Cut | None,
    certainty: Certainty,
    let_on: Mapping[tuple[int, int], Behind],
) -> dict[int, tuple[Permission, ...]]:
    """Those of the last round that are still needed, and new ones."""
    found: dict[int, dict[tuple[int | None, Channel], Permission]] = {}
    for rank, before in (last.permissions if last else {}).items():
        if rank in reports:
            launched = reports[rank].launched
            needed = [one for one in before if launched.get(one.channel, 0) < one.until]
            if needed:
                found[rank] = {(one.thread, one.channel): one for one in needed}
    for (rank, thread), late in let_on.items():
        guesses, passed = last.guesses.get(rank, 0) if last else 0, reports[rank].passed
        if passed is not None and certainty is Certainty.SURE:
            made = Permission(thread, late.channel, late.target, passed + SURE_GROUPS)
        elif passed is not None and certainty is Certainty.GUESS and guesses:
            made = Permission(None, late.channel, late.target, passed + min(GROWTH**guesses, MOST_GROUPS))
        else:
            continue
        found.setdefault(rank, {})[made.thread, made.channel] = made
    return {rank: tuple(sorted(some.values(), key=str)) for rank, some in found.items()}


class Certainty(IntEnum):
    """How certain it is that one of the chosen threads has to pass; the most certain ones pass first."""

    SURE = 0
    GUESS = 1
    UNKNOWN_MEMBER = 2  # the rank may not be a member at all


def _let_on(
    reports: Mapping[int, Report], targets: Counts, behind: Iterable[Behind], still: bool
) -> tuple[Certainty, dict[tuple[int, int], Behind]]:
    """The (rank, thread) pairs that have to pass although no channel of their group is below its target, and what for."""
    options: dict[Certainty, dict[tuple[int, int], Behind]] = {certainty: {} for certainty in Certainty}
    for late in behind:
        report = reports.get(late.rank)
        if report is not None and report.held:
            certainty, threads = _leading(report, late, targets)
            for thread in threads:
                options[certainty].setdefault((late.rank, thread), late)
    for certainty, chosen in options.items():
        if chosen and (still or certainty is Certainty.SURE):
            return certainty, chosen
    return Certainty.SURE, {}


def _leading(report: Report, late: Behind, targets: Counts) -> tuple[Certainty, Iterable[int]]:
    """The waiting threads of a rank that may lead it to the operation; none if it gets there by itself."""
    if any(late.channel in group for group in report.held.values()):
        return Certainty.SURE, ()
    held = report.held.keys() - _going(report, targets)
    if late.why is Why.UNKNOWN_MEMBER:
        return Certainty.UNKNOWN_MEMBER, held
    users = report.users.get(late.channel.comm) or report.held.keys() | report.running.union(*report.users.values())
    if users <= held:
        return (Certainty.SURE if len(users) == 1 else Certainty.GUESS), users
    return Certainty.GUESS, held


def _going(report: Report, targets: Counts) -> frozenset[int]:
    """The threads that run, or will run with the present targets."""
    passing = [thread for thread, group in report.held.items() if may_launch(report.launched, targets, group)]
    return report.running.union(passing) if passing else report.running


def _stands_still(
    reports: Mapping[int, Report], before: Mapping[int, Report], behind: Iterable[int], targets: Counts
) -> bool:
    """Whether there is no progress. One round cannot tell: a thread that was seen waiting for another rank may continue while
    that rank is examined. Threads of ranks that are not behind do not matter, because these ranks have nothing to launch."""
    for rank in behind:
        if rank not in reports or before.get(rank) != reports[rank] or _going(reports[rank], targets):
            return False
    return all(
        before.get(rank) is report or (rank in before and before[rank].launched == report.launched)
        for rank, report in reports.items()
    )


def _behind(
    reports: Mapping[int, Report], targets: Counts, known_members: Mapping[str, tuple[int | None, ...]]
) -> tuple[Behind, ...]:
    """Every member that is below its channel's target, the most likely cause of a delay first."""
    incomplete = {comm for comm, members in known_members.items() if None in members}
    short: dict[Channel, list[int]] = {}  # the ranks that are below the target
    strange: dict[Channel, set[int]] = {}  # those that may or may not be members
    waits: Counter[int] = Counter()
    for channel, target in targets.items():
        members = channel.pair or known_members.get(channel.comm, (None,))
        late = [
            rank
            for rank in members
            if rank is not None and (rank not in reports or reports[rank].launched.get(channel, 0) < target)
        ]
        if late:
            short[channel] = list(dict.fromkeys(late))
            missing = set(late)
            waits.update({rank: len(missing) for rank in members if rank is not None and rank not in missing})
        if channel.pair is None and (channel.comm in incomplete or channel.comm not in known_members):
            # Any rank that is not a known member may be the one that is not known.
            others = (reports.keys() - set(members)) or {UNKNOWN_RANK}
            strange[channel] = {
                rank for rank in others if rank not in reports or reports[rank].launched.get(channel, 0) < target
            }
    whys = {rank: _why(reports.get(rank), targets) for ranks in short.values() for rank in ranks}
    behind = [Behind(rank, channel, targets[channel], whys[rank]) for channel, ranks in short.items() for rank in ranks]
    behind += [
        Behind(rank, channel, targets[channel], Why.UNKNOWN_MEMBER)
        for channel, ranks in strange.items()
        for rank in ranks
    ]
    place = {why: number for number, why in enumerate(Why)}
    behind.sort(
        key=lambda late: (place[late.why], waits[late.rank], late.rank, late.channel.comm, late.channel.pair or ())
    )
    shown = [one._replace(waits_for=_waits_for(one.rank, known_members, short)) for one in behind[:_SHOWN]]
    return (*shown, *behind[_SHOWN:])


def _waits_for(
    rank: int,
    known_members: Mapping[str, tuple[int | None, ...]],
    short: Mapping[Channel, Collection[int]],
) -> tuple[int, ...]:
    found = (
        late
        for channel, late in short.items()
        if rank not in late and rank in (channel.pair or known_members.get(channel.comm, ()))
    )
    return tuple(sorted({other for late in found for other in late}))


def _why(report: Report | None, targets: Counts) -> Why:
    if report is None:
        return Why.SILENT
    if report.ended:
        return Why.ENDED
    if _going(report, targets) - report.running:
        return Why.LET_ON
    return Why.HELD if report.held and not report.running else Why.USER_CODE


def _same_members(reports: Mapping[int, Report], before: Mapping[int, Report]) -> bool:
    return len(reports) == len(before) and all(
        rank in before and (before[rank] is report or before[rank].members is report.members)
        for rank, report in reports.items()
    )


def _members(reports: Mapping[int, Report]) -> dict[str, tuple[int | None, ...]]:
    """The members of every communicator, merged from what each rank knows."""
    known_members: dict[str, tuple[int | None, ...]] = {}
    for report in reports.values():
        for comm, known in report.members.items():
            before = known_members.get(comm)
            if before is None:
                known_members[comm] = known
            elif before is not known:  # reports of one round share most of them
                known_members[comm] = tuple(a if b is None else b for a, b in zip(before, known, strict=True))
    return known_members


def _raise(targets: dict[Channel, int], counts: Iterable[tuple[Channel, int]]) -> None:
    for channel, count in counts:
        if count > targets.get(channel, -1):
            targets[channel] = count
