"""What goes wrong in a round of rollback: a loss, and the moment at which it strikes.

Both are drawn before the round begins. A moment is a time between snapshots, a time after a snapshot or a rollback has begun,
or a fault point at which a daemon waits until the loss has struck.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from integration.chaos.protected_jobs import ProtectedJob
from integration.harness import PATIENCE_S, Cluster
from migrator.lab.layout import OPERATOR
from snapshotd.runtime.faults import Point

_STORE = [Point.BEFORE_BEGIN, Point.BEGIN, Point.BEFORE_FREEZE, Point.STOPPED, Point.FREEZE, Point.BEFORE_DUMP]
_STORE += [Point.DUMPING, Point.STREAM, Point.BEFORE_CONTINUE, Point.CONTINUE, Point.BEFORE_SEND, Point.SEND]
_BUDDY = [Point.BEFORE_PREPARE, Point.PREPARE, Point.RECEIVING, Point.SEAL]
_RECORD = [Point.BEFORE_JOB_BEGIN, Point.JOB_BEGIN, Point.BEFORE_JOB_COMMIT, Point.JOB_COMMIT]
_ENDS = [Point.BEFORE_END_RANKS, Point.END_RANKS]
_TARGET = [*_BUDDY, Point.BEFORE_RESTORE, Point.RESTORING, Point.RESTORED, Point.RESTORE, Point.BEFORE_ACTIVATE]
_TARGET += [Point.ACTIVATED, Point.ACTIVATE]
_DECIDES = [Point.BEFORE_ROLLBACK, Point.ROLLBACK, Point.ROLLED_BACK]
#: Points of a snapshot and of a rollback, by where they are reached: on the coordinator only, or on any node of the job.
POINTS = {
    "snapshot": {"coordinator": _RECORD, "any": [*_STORE, *_BUDDY]},
    "rollback": {"coordinator": [*_DECIDES, *_RECORD], "any": [*_ENDS, *_TARGET, Point.BEFORE_SEND, Point.SEND]},
}
#: Those of jobs with communicators.
NCCL_POINTS = {
    "snapshot": {
        "coordinator": [Point.BEFORE_DETACH, Point.DETACH, Point.ATTACH],
        "any": [Point.QUIESCED, Point.DETACHED, Point.ATTACHING, Point.ATTACHED, Point.BEFORE_OPEN],
    },
    "rollback": {"coordinator": [Point.ATTACH], "any": [Point.ATTACHING, Point.ATTACHED, Point.BEFORE_OPEN]},
}


@dataclass(frozen=True)
class Stage:
    """The job when a round begins. `places`: the nodes of its ranks now; `homes`: those of their launchers."""

    nodes: Sequence[str]
    places: Sequence[str]
    homes: Sequence[str]
    coordinator: str
    nccl: bool = False

    @property
    def ranks(self) -> int:
        return len(self.homes)


class Course(Protocol):
    """The round, as a loss sees it."""

    nodes: Cluster
    notes: list[str]

    @property
    def job(self) -> ProtectedJob: ...
    def kill_guard(self) -> None: ...
    def start_guard(self) -> None: ...


@dataclass(frozen=True)
class Moment:
    """`during`: "" (between snapshots), "snapshot" or "rollback". With a point: it strikes while a daemon waits there."""

    during: str
    after_s: float
    point: Point | None = None
    node: str = ""
    victim: int = 0  # of a rollback: the rank that is killed so that there is one

    def __str__(self) -> str:
        if self.point is not None:
            return f"at {self.point} of a {self.during} on {self.node}{self._because()}"
        return f"{self.after_s:.1f} s after a {self.during or 'round'} began{self._because()}"

    def _because(self) -> str:
        return f" (rank {self.victim} was killed)" if self.during == "rollback" else ""


@dataclass(frozen=True)
class Loss:
    """`strike` does the harm; `mend` undoes it, `down_s` later."""

    kind: str
    words: str
    strike: Callable[[Course], None]
    down_s: float = 0.0
    mend: Callable[[Course], None] = lambda course: None


def draw_moment(random: Random, stage: Stage, every_s: float) -> Moment:
    during = random.choices(["", "snapshot", "rollback"], [3, 3, 4])[0]
    victim = random.randrange(stage.ranks)
    if during and random.random() < 0.6:
        where = random.choice(["coordinator", "any"])
        points = NCCL_POINTS if stage.nccl and random.random() < 0.5 else POINTS
        node = stage.coordinator if where == "coordinator" else random.choice(stage.places)
        return Moment(during, 0.0, random.choice(points[during][where]), node, victim)
    most_s = {"": every_s + 2.0, "snapshot": 2.0, "rollback": 5.0}[during]
    return Moment(during, random.uniform(0.0, most_s), victim=victim)


def _kill_ranks(course: Course, ranks: Sequence[int]) -> None:
    for rank in ranks:
        found = course.job.copies(rank)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            course.notes.append(f"rank {rank} had no process")


def rank_killed(random: Random, stage: Stage, moment: Moment) -> Loss:
    rank = random.randrange(stage.ranks)
    return Loss("rank-kill", f"SIGKILL to rank {rank}", lambda course: _kill_ranks(course, [rank]))


def two_ranks_killed(random: Random, stage: Stage, moment: Moment) -> Loss:
    two = random.sample(range(stage.ranks), 2)
    return Loss("two-ranks", f"SIGKILL to ranks {two[0]} and {two[1]}", lambda course: _kill_ranks(course, two))


def node_off(random: Random, stage: Stage, moment: Moment) -> Loss:
    return _off("node-off", random, random.choice(stage.nodes))


def first_node_off(random: Random, stage: Stage, moment: Moment) -> Loss:
    """The node of rank 0, and of the job's store."""
    return _off("first-node-off", random, stage.places[0])


def _off(kind: str, random: Random, node: str) -> Loss:
    """A power cut: the launchers there end as well. The disk remains, what was in memory does not."""
    down_s = random.choice([random.uniform(0.0, 10.0), random.uniform(20.0, 60.0)])

    def strike(course: Course) -> None:
        course.job.node_is_off(node)
        course.nodes.lab.crash(node)

    def mend(course: Course) -> None:
        course.nodes.lab.boot(node, timeout_s=PATIENCE_S)

    return Loss(kind, f"power-off of {node} for {down_s:.1f} s", strike, down_s, mend)


def daemon_killed(random: Random, stage: Stage, moment: Moment) -> Loss:
    node = moment.node if moment.node and random.random() < 0.7 else random.choice(stage.nodes)
    return _without_daemon("daemon-kill", random, node)


def first_daemon_killed(random: Random, stage: Stage, moment: Moment) -> Loss:
    """The daemon on the node of the launcher of rank 0."""
    return _without_daemon("first-daemon-kill", random, stage.homes[0])


def _without_daemon(kind: str, random: Random, node: str) -> Loss:
    down_s = random.choice([0.0, random.uniform(0.0, 5.0), random.uniform(5.0, 20.0)])

    def strike(course: Course) -> None:
        course.nodes.lab.kill_daemon(node, timeout_s=PATIENCE_S)

    def mend(course: Course) -> None:
        if course.nodes.lab.daemon_pid(node) is None:
            course.nodes.lab.start_daemon(node, timeout_s=PATIENCE_S)

    return Loss(kind, f"SIGKILL to the daemon of {node} for {down_s:.1f} s", strike, down_s, mend)


def cable_out(random: Random, stage: Stage, moment: Moment) -> Loss:
    return _cut_off("cable-out", random, random.choice(stage.nodes))


def first_cable_out(random: Random, stage: Stage, moment: Moment) -> Loss:
    return _cut_off("first-cable-out", random, stage.places[0])


def _cut_off(kind: str, random: Random, node: str) -> Loss:
    down_s = random.choice([random.uniform(0.5, 8.0), random.uniform(8.0, 20.0), random.uniform(20.0, 50.0)])

    def others(course: Course) -> list[str]:
        return [other for other in (*course.nodes.lab.nodes, OPERATOR) if other != node]

    def strike(course: Course) -> None:
        for other in others(course):
            course.nodes.lab.partition(node, other)

    def mend(course: Course) -> None:
        for other in others(course):
            course.nodes.lab.heal(node, other)

    return Loss(kind, f"the cable of {node} out for {down_s:.1f} s", strike, down_s, mend)


def guard_killed(random: Random, stage: Stage, moment: Moment) -> Loss:
    down_s = random.choice([0.0, random.uniform(0.0, 5.0), random.uniform(5.0, 20.0)])
    return Loss(
        "guard-kill",
        f"SIGKILL to `migrator protect` for {down_s:.1f} s",
        lambda course: course.kill_guard(),
        down_s,
        lambda course: course.start_guard(),
    )


LOSSES: dict[str, Callable[[Random, Stage, Moment], Loss]] = {
    "rank-kill": rank_killed,
    "two-ranks": two_ranks_killed,
    "node-off": node_off,
    "first-node-off": first_node_off,
    "daemon-kill": daemon_killed,
    "first-daemon-kill": first_daemon_killed,
    "cable-out": cable_out,
    "first-cable-out": first_cable_out,
    "guard-kill": guard_killed,
}


def draw_loss(random: Random, stage: Stage, moment: Moment, among: Sequence[str] = tuple(LOSSES)) -> Loss:
    return LOSSES[random.choice(among)](random, stage, moment)
