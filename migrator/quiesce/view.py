"""What the driver knows of an NCCL job from round to round: the reports of its processes, the cut, what each gate was told.

Invariant: a process that has reached its targets and has no permission launches nothing, so its last report is as good as
a new one: only nodes with other processes have to be asked (`View.to_ask`), and only gates that lack something are told.
It does no I/O; it reads the clock, to tell idle processes from active ones.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from migrator.quiesce.cut import Counts, Cut, Decision, Report, next_targets
from migrator.quiesce.process_reports import (
    Membership,
    Numbers,
    Process,
    ProcessReport,
    Rows,
    ahead_of_itself,
    only_counts,
    report_for_cut,
    rows_for,
    to_proto,
    updated,
)
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import RankGone, Where

#: A process whose counts have not changed for this long counts as idle: threads that wait at its gate may pass.
PATIENCE_S = 0.5
#: After the first guess: so many times as long as processes took until they went on, but no less than this.
PATIENCE_TIMES, PATIENCE_MIN_S = 4.0, 0.03


class View:
    """What is known of the job, from round to round. Only what has changed is looked at again.

    It also distinguishes idle from active processes. What threads do outside the gate is invisible here; only arrivals count.
    """

    def __init__(self, description: pb.MoveDescription) -> None:
        self.description = description
        self.numbers, self.membership = Numbers(), Membership()
        self.cut: Cut | None = None
        self._latest: dict[Process, ProcessReport] = {}
        self._seen: dict[Process, _Seen] = {}
        self._told: dict[Process, tuple[Rows, float]] = {}  # what each gate was told last, and when
        self._looked: dict[Process, float] = {}  # when each was asked last
        self._slowest_s = 0.0  # the longest time for which a process was seen not to go on, and then did

    def next(
        self, reports: Collection[ProcessReport], asked: Collection[str] | None = None
    ) -> tuple[Cut, dict[str, list[pb.ProcessTargets]]]:
        """The cut after these reports of all processes on the nodes `asked` (None: of all), and what gates have to be told
        before the next round, by node."""
        self._find_ended(reports, asked)
        self.numbers.add([report for report in reports if report.process not in self._latest])
        now, changed = time.monotonic(), dict[Process, list[pb.Communicator] | None]()
        for report in reports:
            seen = self._seen.get(report.process)
            if seen is None or seen.gate != report.gate:
                changed[report.process] = only_counts(seen.gate, report.gate) if seen is not None else None
                if changed[report.process] is None:
                    self.membership.add(report, self.numbers(report.process))
                self._latest[report.process] = report
                if seen is not None:
                    self._note_pause(report.process, seen)
            self._looked[report.process] = now
        shown = self._for_cut(changed)
        self.cut = next_targets(shown, self._raised())
        return self.cut, self._changes(self.cut)

    def to_ask(self) -> set[str] | None:
        """The nodes where a process may have gone on since; None: all."""
        moving = self.cut.moving() if self.cut is not None else None
        if moving is None:
            return None
        return {report.node for process, report in self._latest.items() if self.numbers(process) in moving}

    def _find_ended(self, reports: Iterable[ProcessReport], asked: Collection[str] | None) -> None:
        for process in self._latest.keys() - {report.process for report in reports}:
            last = self._latest[process]
            if asked is not None and last.node not in asked:
                continue
            if last.gate.communicators:
                raise RankGone(
                    f"process {process.pid} of rank {last.rank} has ended, and the others wait for it",
                    where=Where.SOURCE_RUNNING,
                )
            del self._latest[process]

    @property
    def patience_s(self) -> float:
        """How long a process that does not change counts as active. Once a guess has been made, threads of this job are known
        to take turns, and the time that its processes needed to go on tells how long to wait before the next one."""
        if self.cut is None or not self.cut.guesses:
            return PATIENCE_S
        return min(PATIENCE_S, max(PATIENCE_MIN_S, PATIENCE_TIMES * self._slowest_s))

    def _note_pause(self, process: Process, before: _Seen) -> None:
        """A process has gone on. Counts until it was last seen not to have: this side may have been slow to look again."""
        told_at = self._told[process][1] if process in self._told else 0.0
        self._slowest_s = max(self._slowest_s, self._looked[process] - max(before.since, told_at))

    def _for_cut(self, changed: Mapping[Process, list[pb.Communicator] | None]) -> dict[int, Report]:
        made, now, patience_s, version = {}, time.monotonic(), self.patience_s, self.membership.version
        for process, report in self._latest.items():
            me, seen = self.numbers(process), self._seen.get(process)
            if seen is None or seen.version != version or seen.gate is not report.gate:
                seen = self._seen[process] = self._look(report, me, seen, changed.get(process), now)
            made[me] = seen.idle if now - seen.since > patience_s else seen.active
        return made

    def _look(
        self, report: ProcessReport, me: int, before: _Seen | None, changed: list[pb.Communicator] | None, now: float
    ) -> _Seen:
        simple = before is not None and before.version == self.membership.version and not before.several
        if before is not None and simple and changed is not None and not report.gate.ended:
            shown = updated(before.idle, report, changed, me, self.membership)
        else:
            shown = report_for_cut(report, me, self.membership)
        if before is not None and before.idle.members == shown.members:
            shown = replace(shown, members=before.idle.members)  # so that comparing it costs nothing
        since = before.since if before is not None and before.idle == shown else now
        running = report.not_waiting(shown)
        active = replace(shown, running=running) if running else shown
        several = ahead_of_itself(report, shown, self.membership)
        return _Seen(report.gate, self.membership.version, shown, active, since, several)

    def _raised(self) -> Cut:
        """The last cut with every target at least what some member has launched, and without aborted communicators."""
        last = self.cut or Cut(Decision.RUN_ON, "", {}, (), {}, {})
        several = [seen.several for seen in self._seen.values() if seen.several]
        aborted = self.membership.aborted
        if not aborted and not several:
            return last
        targets = {channel: count for channel, count in last.targets.items() if channel.comm not in aborted}
        for counts in several:
            for channel, count in counts.items():
                targets[channel] = max(targets.get(channel, 0), count)
        permissions = {
            rank: tuple(one for one in some if one.channel.comm not in aborted)
            for rank, some in last.permissions.items()
        }
        return replace(last, targets=targets, permissions=permissions)

    def _changes(self, cut: Cut) -> dict[str, list[pb.ProcessTargets]]:
        """Targets that are reached, and permissions that are not needed any more, end by themselves, except for a
        communicator that was aborted since."""
        aborted, now = self.membership.aborted, time.monotonic()
        moving = cut.wanted.keys() | cut.permissions.keys()
        found: dict[str, list[pb.ProcessTargets]] = {}
        for process, report in self._latest.items():
            me, (told, _) = self.numbers(process), self._told.get(process, (Rows(), 0.0))
            if me not in moving and not (aborted and told.names(aborted)):
                continue
            rows = Rows(rows_for(me, cut.wanted.get(me, {}), self.membership), cut.permissions.get(me, ()))
            if not told.suffices(rows) or (aborted and told.names(aborted)):
                self._told[process] = rows, now
                found.setdefault(report.node, []).append(to_proto(process, me, rows, self.membership))
        return found


@dataclass(frozen=True)
class _Seen:
    """One process in the last round."""

    gate: pb.ProcessGate
    version: int  # of the membership that its report was made with
    idle: Report  # if nothing has changed for a while
    active: Report  # otherwise
    since: float  # when it last changed
    several: Counts  # of `ahead_of_itself`
