"""What the nodes say about the progress of their ranks, put together by job, and the alarms that follow.

Invariant: a node speaks for itself only. What it says of a rank counts if the node lists this rank as its own, and a
member of a communicator that two nodes claim makes this communicator count for nothing. So a node in the hands of an
attacker can hide stragglers. It can blame another rank of a job of which it has a rank, but no move follows unless a
second node, or the node of that rank, says the same (facts.py).

Nothing is asked here: engine.py asks the nodes. No clock: the time of a reading follows from its number.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from migrator.autopilot.model import Alarm, Loss, NodeProgress, Rank, RankProgress, Severity
from migrator.autopilot.pace import History, Pace
from migrator.autopilot.policy import Progress as Settings
from migrator.autopilot.stragglers import Counted, Group, Straggler, Watch

CHECKS = STRAGGLER, STALL = "job-straggler", "job-stall"
#: How much the clocks of two nodes may differ for their readings to be compared (snapshotd/progress/schedule.py).
ALLOWED_SKEW_S = 0.03
#: How long a reading is kept for nodes that have not answered yet.
HORIZON_S = 30.0
#: Without a complete reading for so long, nothing is said about a job's stragglers.
STALE_S = 120.0
#: How long what was known before a restart of the autopilot is kept until there are enough readings.
RESUME_S = 120.0
#: A rank is stalled only if it has not stood still for half as long before: evaluations and checkpoints take their time.
STALL_TIMES = 2.0
_REMEDY = "compare the node with others (clocks, temperature, other processes on it), or move the rank away"
_STALL_REMEDY = "look at the rank's output and stack (py-spy dump), and at the network; a move cannot wake it"


@dataclass
class _Job:
    watch: Watch = field(default_factory=Watch)
    pending: dict[int, dict[int, Group]] = field(default_factory=dict)  # by reading and communicator
    done: int = 0  # the last reading that was taken in
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class _Said:
    rank: Rank
    progress: RankProgress


class Jobs:
    """All jobs of the cluster."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._jobs: dict[tuple[str, int], _Job] = {}  # by job and period of the readings
        self._said: dict[str, dict[str, _Said]] = {}  # by node and rank
        self._ahead_s: dict[
            str, tuple[float, float]
        ] = {}  # by node: its clock against this one's, and how sure that is
        self._resumed: dict[str, Alarm] = {}  # by rank
        self._resumed_until = 0.0

    def resume(self, alarms: Iterable[Alarm], now: float) -> None:
        """Takes up the alarms that were raised before a restart."""
        mine = [alarm for alarm in alarms if alarm.check in CHECKS]
        self._resumed = {alarm.subject.removeprefix("rank:"): alarm for alarm in mine}
        self._resumed_until = now + RESUME_S

    def take(self, report: NodeProgress, ranks: Iterable[Rank], least_unix_s: float) -> None:
        """What a node has answered. `ranks`: those that it lists; `least_unix_s`: older readings are not wanted."""
        mine = {rank.uid: rank for rank in ranks if not rank.moving}
        self._said[report.node] = {
            one.uid: _Said(mine[one.uid], one) for one in report.ranks if one.uid in mine and one.measure
        }
        self._ahead_s[report.node] = (report.ahead_s, report.unsure_s)
        if not report.period_ms or not self._comparable(report.node):
            return
        least = int(least_unix_s * 1000 / report.period_ms)
        most = least + 4 * HORIZON_S * 1000 / report.period_ms
        for said in self._said[report.node].values():
            job = self._jobs.setdefault((said.rank.job_key, report.period_ms), _Job())
            new = max(least, job.done)
            for comm in said.progress.communicators:
                for number, early, late in zip(comm.numbers, comm.early, comm.late, strict=True):
                    if new < number < most:
                        groups = job.pending.setdefault(number, {})
                        group = groups.get(comm.id)
                        if group is None:
                            group = groups[comm.id] = Group(comm.nranks)
                        group.contested = group.contested or group.nranks != comm.nranks
                        group.add(comm.member, Counted(said.rank.uid, report.node, early, late))

    def _comparable(self, node: str) -> bool:
        """Whether its clock is that of the others."""
        median = statistics.median(ahead for ahead, _ in self._ahead_s.values())
        ahead, unsure = self._ahead_s[node]
        return abs(ahead - median) <= ALLOWED_SKEW_S + unsure

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Keeps only what concerns these ranks."""
        ranks = list(ranks)
        known = {(rank.node, rank.uid) for rank in ranks}
        self._said = {
            node: {uid: one for uid, one in said.items() if (node, uid) in known} for node, said in self._said.items()
        }
        # Also those of which nothing is said now, because a rank is being moved.
        jobs = {rank.job_key for rank in ranks}
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] in jobs}
        self._resumed = {uid: alarm for uid, alarm in self._resumed.items() if (alarm.node, uid) in known}

    def pace(self, job_key: str) -> Pace | None:
        """How fast a job was during the last minutes. None: its collectives are not counted, or not on all its nodes."""
        found = [job for (name, _), job in self._jobs.items() if name == job_key and job.done]
        return max(found, key=lambda job: job.history.newest_unix_s).history.pace if found else None

    def alarms(self, now: float) -> list[Alarm]:
        """What is to be said about the jobs now."""
        made: dict[tuple[str, str], Alarm] = {}
        ranks = {(node, uid): one.rank for node, said in self._said.items() for uid, one in said.items()}
        unsettled = set()
        for (name, period_ms), job in self._jobs.items():
            self._advance(job, name, period_ms, now)
            found = job.watch.straggler
            if not job.watch.settled:
                unsettled.add(name)
            if found is not None and (found.node, found.uid) in ranks:
                made[STRAGGLER, found.uid] = _straggler(ranks[found.node, found.uid], found, now)
        by_job: dict[str, list[_Said]] = {}
        for said in self._said.values():
            for one in said.values():
                by_job.setdefault(one.rank.job_key, []).append(one)
        for members in by_job.values():
            for alarm in self._stalls(members, made, now):
                made[STALL, alarm.subject.removeprefix("rank:")] = alarm
        for uid, alarm in self._resumed.items():
            job_key = next((rank.job_key for (_, known), rank in ranks.items() if known == uid), None)
            if now < self._resumed_until and (job_key is None or job_key in unsettled):
                made.setdefault((alarm.check, uid), alarm)
        return [made[key] for key in sorted(made)]

    def _advance(self, job: _Job, name: str, period_ms: int, now: float) -> None:
        """Takes in the readings that are complete. A node gives them in order, so what is missing before them never comes."""
        if not job.done:
            for alarm in self._resumed.values():
                if alarm.loss is not None and alarm.loss.job_key == name:
                    job.watch.resume(_resumed(alarm))
        for number in sorted(job.pending):
            groups = job.pending[number]
            widest = max(groups.values(), key=lambda group: group.nranks)
            if widest.complete:
                job.watch.add(number, period_ms / 1000, groups, self._settings.straggler_percent / 100)
                job.history.add(number * period_ms / 1000, *job.watch.latest)
                job.done = number
        if job.done and now - job.done * period_ms / 1000 > STALE_S:
            job.watch.expire()
        least = max(job.done, int((now - HORIZON_S) * 1000 / period_ms))
        job.pending = {number: groups for number, groups in job.pending.items() if number > least}

    def _stalls(self, members: list[_Said], made: Mapping[tuple[str, str], Alarm], now: float) -> list[Alarm]:
        stalled = [one for one in members if self._is_stalled(one.progress)]
        if not stalled:
            return []
        stalled.sort(key=lambda one: (one.rank.rank, one.rank.uid))
        causes = [one for one in stalled if (STRAGGLER, one.rank.uid) in made]
        if causes:
            why, severity = "and the others of its job wait for it", Severity.WARNING
        elif len(stalled) < len(members):
            causes, severity = stalled[:4], Severity.WARNING
            why = f"and {len(members) - len(stalled)} of the {len(members)} ranks of its job still do"
        else:
            causes, severity = stalled[:1], Severity.NOTICE
            why = "nor has any other rank of its job" if len(members) > 1 else "and its job has no other rank here"
        return [_stall(one, why, severity, now) for one in causes]

    def _is_stalled(self, progress: RankProgress) -> bool:
        return progress.unchanged_s >= max(self._settings.stall_s, STALL_TIMES * progress.usual_s)


def _straggler(rank: Rank, found: Straggler, now: float) -> Alarm:
    who = f"rank {rank.rank} of job {rank.job}"
    text = (
        f"{who} keeps the {found.others} other ranks waiting: the job makes {found.now_per_s:.2g} collectives a second, and"
        f" made {found.usual_per_s:.2g} before; {found.lost_share:.0%} of its time is lost by this rank"
    )
    loss = Loss(
        rank.job_key,
        round(found.lost_share, 4),
        round(found.lost_s, 2),
        round(found.usual_per_s, 4),
        round(found.now_per_s, 4),
        found.others,
        found.confirmed,
    )
    return Alarm(
        found.node,
        STRAGGLER,
        f"rank:{found.uid}",
        # What one node alone says must not make another one suspect.
        Severity.WARNING if found.confirmed else Severity.NOTICE,
        text,
        found.since_unix_s,
        now,
        remedy=_REMEDY,
        loss=loss,
    )


def _resumed(alarm: Alarm) -> Straggler:
    assert alarm.loss is not None
    loss = alarm.loss
    return Straggler(
        alarm.subject.removeprefix("rank:"),
        alarm.node,
        loss.share,
        loss.lost_s,
        alarm.since_unix_s,
        loss.usual_per_s,
        loss.now_per_s,
        loss.others,
        loss.confirmed,
    )


_MEASURES = {"nccl": "launched no NCCL operation", "tcp": "neither sent nor received anything", "cpu": "not run"}


def _stall(one: _Said, why: str, severity: Severity, now: float) -> Alarm:
    rank, progress = one.rank, one.progress
    text = (
        f"rank {rank.rank} of job {rank.job} has {_MEASURES[progress.measure]} for at least"
        f" {progress.unchanged_s // 60 * 60:.0f} s, {why}"
    )
    began = now - progress.unchanged_s
    return Alarm(rank.node, STALL, f"rank:{rank.uid}", severity, text, began, now, remedy=_STALL_REMEDY)
