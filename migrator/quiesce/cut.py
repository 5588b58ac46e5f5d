"""Where a job that speaks NCCL can stand still: from what every rank's gate has counted to how far each may go on.

The job is to be held at one consistent cut. Invariant: at the cut every end of every channel has launched the same
operations, so all that was launched can finish and nobody waits for an operation that another rank is kept from.
A **channel** is the collectives of one communicator (its ends: all members) or its sends from one rank to another (its
ends: those two). A **group** is what one thread launches as a unit, whole or not at all.

Each round the driver gathers a `Report` per rank, calls `next_targets`, and hands `Cut.targets` to every gate; a gate lets
a thread pass by `may_launch`. Targets only grow. The target of a channel is the most that any end has launched. A rank
behind a target has to run, which may take it through groups on other channels: those raise their targets in turn, and so
on until nobody is behind. Only what an earlier step makes necessary is let on, so the fixpoint is the least cut.

**What is not known here** is the order of a rank's program. Rank r is behind on a channel, and no thread of it is held at
that channel's next operation. Who will come to it? Those that drive the communicator: the threads that have used it before,
or, where none has, any thread of the rank.
- One of them runs: it comes by itself. Wait.
- There is only one, and it is held at another group: that group comes first in its program, so it is let on, for certain.
- Several are held, or one is idle, waiting for another thread: a guess. All held threads that may lead there go on by one
  group. Guesses are made only when the ranks that are behind stand still: two equal rounds, none of their threads running,
  nothing certain left.
While no thread takes over a communicator that it never used, and `running` is true, the same start ends at the same cut,
however the steps of the ranks interleave, and a cut without a guess is the least. So is one with guesses where at most one
thread of a rank is held at a time and the idle ones wait for it, as main and autograd threads do. Otherwise a cut may lie
beyond the least by what the wrong threads launched. It is consistent all the same: **no hint in a report (`users`,
`running`) can make a cut wrong, only later than need be**.

A dependence between ranks around NCCL (a store's key, a gloo barrier) is invisible here: a rank that waits there for one
held at the gate is never reached. So is one stuck in user code. The driver's time-out ends the attempt, opens the gates and
quotes `Cut.reason`; another attempt begins elsewhere in the program. No I/O and no clock in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Channel(NamedTuple):
    comm: str
    pair: tuple[int, int] | None = None  # (sender, receiver), as the job numbers its ranks; None: the collectives

    def operation(self, number: int, rank: int) -> str:
        """The channel's operation with this number, as `rank` would call it."""
        if self.pair is None:
            return f"operation {number} of communicator {self.comm}"
        sender, receiver = self.pair
        end = f"send {number} to rank {receiver}" if rank == sender else f"receive {number} from rank {sender}"
        return f"{end} on communicator {self.comm}"


UNKNOWN_RANK = -1  # a member of a communicator that no rank with a report can be
Counts = Mapping[Channel, int]  # operations launched, targets, or what a group adds; a channel that is missing has 0


@dataclass(frozen=True)
class Report:
    """What one rank's gate knows. The gate has been closed before the first round (empty targets let nothing pass), and
    a round is asked for only when every gate has the targets of the round before.

    An operation counts from the moment it passes the gate. Creating a communicator is the first operation of its
    collectives, a split one of the parent's: all members must come, as for any other. A send to oneself counts once, with
    its receive. What was launched on a communicator that is destroyed by now still counts.
    """

    launched: Counts
    held: Mapping[int, Counts] = field(default_factory=dict)  # the group that each thread at the gate wants to launch
    # The rank at each seat of the communicators that this rank has created; None: not known to it, or not yet.
    members: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    users: Mapping[str, frozenset[int]] = field(default_factory=dict)  # threads that have used each communicator
    # Threads not held that seem to work their way to the gate. One that has used no processor time for a while is
    # idle, and left out; so is, once the driver's patience ends, one that spins for longer than that.
    running: frozenset[int] = frozenset()
    ended: bool = False  # this rank will launch nothing more


class Decision(StrEnum):
    RUN_ON = "run on"  # hand out the targets, ask again
    REACHED = "reached"  # every rank stays where it is until it gets other targets
    NEVER = "never"  # give up now: waiting does not help


class Why(StrEnum):
    """Why a rank may not be where it should; the most telling first."""

    ENDED = "it has ended"
    SILENT = "it does not answer"
    USER_CODE = "it is in user code"
    HELD = "it waits at the gate"
    LET_ON = "it has just been let on"
    UNKNOWN_MEMBER = "it may be one of the members that have yet to create it"


@dataclass(frozen=True)
class Behind:
    rank: int
    channel: Channel
    target: int
    why: Why
    waits_for: tuple[int, ...] = ()  # ranks behind an operation that this one has launched

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
    behind: tuple[Behind, ...]  # who has to run, the likeliest culprit first
    guessed: frozenset[int]  # ranks that were let on by a guess so far; none: the cut is the least
    reports: Mapping[int, Report]  # what this was computed from: the next round sees by it whether anything moves


def may_launch(launched: Counts, targets: Counts, group: Counts) -> bool:
    """The gate's rule. One channel below its target is enough: another end is already committed to that operation, so
    this group is inside the cut, with all its other channels, whose targets follow when the rank reports."""
    return any(launched.get(channel, 0) < targets.get(channel, 0) for channel in group)


def next_targets(reports: Mapping[int, Report], last: Cut | None = None) -> Cut:
    """How far every rank may go on: from this round's reports, of all ranks, and the cut computed in the last round."""
    targets = dict(last.targets) if last else {}
    for report in reports.values():
        _raise(targets, report.launched.items())
    behind = _behind(reports, targets)
    guessed = last.guessed if last else frozenset()
    if not behind:
        return Cut(Decision.REACHED, "every rank has launched the same operations", targets, (), guessed, reports)
    first, more = str(behind[0]), len(behind) - 1
    reason = f"{first} (and {more} more)" if more else first
    if behind[0].why is Why.ENDED:
        return Cut(Decision.NEVER, reason, targets, behind, guessed, reports)
    still = last is not None and _stands_still(reports, last.reports, {late.rank for late in behind}, targets)
    certainty, let_on = _let_on(reports, targets, behind, still)
    for rank, thread in let_on:
        report = reports[rank]
        _raise(targets, ((channel, report.launched.get(channel, 0) + n) for channel, n in report.held[thread].items()))
    if let_on and certainty is not Certainty.SURE:
        ranks = sorted({rank for rank, _ in let_on})
        guessed = guessed.union(ranks)
        reason += f"; nothing moves, so rank {', '.join(map(str, ranks))} is let on by a guess"
    return Cut(Decision.RUN_ON, reason, targets, behind, guessed, reports)


class Certainty(IntEnum):
    """How sure it is that one of the threads chosen has to go on; the surer is let on first."""

    SURE = 0
    GUESS = 1
    UNKNOWN_MEMBER = 2  # the rank may have nothing to do with it


def _let_on(
    reports: Mapping[int, Report], targets: Counts, behind: Iterable[Behind], still: bool
) -> tuple[Certainty, set[tuple[int, int]]]:
    """The (rank, thread) that shall pass although no channel of the group held there is below its target."""
    options: dict[Certainty, set[tuple[int, int]]] = {certainty: set() for certainty in Certainty}
    for late in behind:
        if late.rank in reports:
            certainty, threads = _leading(reports[late.rank], late, targets)
            options[certainty] |= {(late.rank, thread) for thread in threads}
    for certainty, chosen in options.items():
        if chosen and (still or certainty is Certainty.SURE):
            return certainty, chosen
    return Certainty.SURE, set()


def _leading(report: Report, late: Behind, targets: Counts) -> tuple[Certainty, Iterable[int]]:
    """The held threads of a rank that may lead it to what it has not reached; none where it gets there by itself."""
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
    """The threads that move or will, by the targets as they are."""
    passing = (thread for thread, group in report.held.items() if may_launch(report.launched, targets, group))
    return report.running.union(passing)


def _stands_still(
    reports: Mapping[int, Report], before: Mapping[int, Report], behind: Iterable[int], targets: Counts
) -> bool:
    """Whether nothing moves any more. One look does not tell: a thread seen waiting for another rank may go on when that
    one is looked at. Ranks that are not behind have nothing to launch, so what their threads do is of no interest."""
    for rank in behind:
        if rank not in reports or before.get(rank) != reports[rank] or _going(reports[rank], targets):
            return False
    return all(rank in before and before[rank].launched == report.launched for rank, report in reports.items())


def _behind(reports: Mapping[int, Report], targets: Counts) -> tuple[Behind, ...]:
    """Every end that is short of its channel's target, the likeliest culprit first."""
    seats = _seats(reports)
    short: list[tuple[int, Channel, bool]] = []
    waits: dict[int, set[int]] = {}
    for channel, target in targets.items():
        members = channel.pair or seats.get(channel.comm, (None,))
        ends = {rank for rank in members if rank is not None}
        if None in members:  # whoever is not known to be a member may be this one
            ends |= (reports.keys() - ends) or {UNKNOWN_RANK}
        done = {rank: reports[rank].launched.get(channel, 0) if rank in reports else 0 for rank in ends}
        late = {rank for rank in ends if done[rank] < target}
        short += [(rank, channel, rank in members) for rank in late]
        for rank in ends - late:
            waits.setdefault(rank, set()).update(late & set(members))
    behind = [
        Behind(
            rank,
            channel,
            targets[channel],
            _why(reports.get(rank), targets) if member else Why.UNKNOWN_MEMBER,
            tuple(sorted(waits.get(rank, ()))),
        )
        for rank, channel, member in short
    ]
    order = list(Why)
    return tuple(sorted(behind, key=lambda b: (order.index(b.why), len(b.waits_for), b.rank, str(b.channel))))


def _why(report: Report | None, targets: Counts) -> Why:
    if report is None:
        return Why.SILENT
    if report.ended:
        return Why.ENDED
    if _going(report, targets) - report.running:
        return Why.LET_ON
    return Why.HELD if report.held and not report.running else Why.USER_CODE


def _seats(reports: Mapping[int, Report]) -> dict[str, tuple[int | None, ...]]:
    """The members of every communicator, put together from what each rank knows of them."""
    seats: dict[str, tuple[int | None, ...]] = {}
    for report in reports.values():
        for comm, known in report.members.items():
            before = seats.get(comm, (None,) * len(known))
            seats[comm] = tuple(a if b is None else b for a, b in zip(before, known, strict=True))
    return seats


def _raise(targets: dict[Channel, int], counts: Iterable[tuple[Channel, int]]) -> None:
    for channel, count in counts:
        targets[channel] = max(targets.get(channel, 0), count)
