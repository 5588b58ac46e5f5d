"""What goes wrong in a round. A fault is a generator: it is resumed every few milliseconds until it has done its harm and
mended it, so that several of them and the move proceed side by side.

Every fault is drawn completely before the round begins. Times are fractions of the time that a move takes on this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from integration.chaos import jobs, processes
from integration.chaos.jobs import ChaosJob
from integration.harness import PATIENCE_S, SHORT_LEASE, Cluster
from migrator.lab.layout import OPERATOR
from snapshotd.runtime.faults import Point

SOURCE_POINTS = [
    *(Point.BEFORE_BEGIN, Point.BEGIN, Point.SENT_AHEAD, Point.READY, Point.BEFORE_FREEZE, Point.STOPPED, Point.FREEZE),
    *(
        Point.BEFORE_DUMP,
        Point.DUMPING,
        Point.STREAM,
        Point.BEFORE_COMMIT,
        Point.COMMIT,
        Point.BEFORE_RELEASE,
        Point.RELEASE,
    ),
]
TARGET_POINTS = [
    *(Point.BEFORE_PREPARE, Point.PREPARE, Point.RECEIVING, Point.SEAL, Point.BEFORE_RESTORE, Point.KEEPER_STARTED),
    *(Point.RESTORING, Point.RESTORED, Point.RESTORE, Point.BEFORE_ACTIVATE, Point.ACTIVATED, Point.ACTIVATE),
]
PEER_POINTS = [
    *(Point.BEFORE_SUSPEND, Point.SUSPEND, Point.BEFORE_REPOINT, Point.REPOINTING, Point.REPOINT, Point.BEFORE_SETTLE),
]
GATE_POINTS = [
    *(Point.QUIESCED, Point.BEFORE_DETACH, Point.DETACHED, Point.BEFORE_ATTACH, Point.ATTACHING, Point.ATTACHED),
    Point.BEFORE_OPEN,
]
_DEATH_S = 5.0
#: The part of a move in which it is checked.
_CHECKS = 0.3
DEVICE_POINTS = {
    "source": [Point.PARKED, Point.LOCKED, Point.OFFLOADED, Point.CHECKPOINTED],
    "target": [Point.CUDA_RESTORED, Point.REFILLED],
}
UNDO_POINTS = {"source": [Point.BEFORE_ABORT, Point.ABORT], "target": [Point.BEFORE_DISCARD, Point.DISCARD]}


@dataclass
class Round:
    """One move and what goes wrong meanwhile."""

    number: int
    nodes: Cluster
    job: ChaosJob
    rank: int
    source: str
    target: str
    peer: str  # the node of another rank of the job, or one that the move does not concern
    typical_s: float  # how long a move takes here
    everyone: list[ChaosJob] = field(default_factory=list)  # all jobs that run
    hit: set[str] = field(default_factory=set)  # the jobs that may end, because a node on which they depend has crashed
    to: str = ""
    driver: subprocess.Popen[str] | None = None
    over: bool = False  # the driver has ended
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moves_before = self._moves()

    def begun(self) -> bool:
        """Whether a daemon has written down the move."""
        return self._moves() != self._moves_before

    def _moves(self) -> set[str]:
        state = self.nodes.lab.layout.state
        return {path.name for node in (self.source, self.target) for path in (state / node / "moves").glob("m-*")}

    def node(self, role: str) -> str:
        return {"source": self.source, "target": self.target, "peer": self.peer, OPERATOR: OPERATOR}[role]


Act = Callable[[Round], Iterator[None]]


@dataclass(frozen=True)
class Fault:
    kind: str
    words: str
    act: Act
    may_end: bool = False  # the rank may end, and its job with it
    answer_is_open: bool = False  # the answer of `migrator move` does not say where the rank is


# ---------------------------------------------------------------- times and nodes


def lapse(seconds: float) -> Iterator[None]:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        yield


def moment(round_: Round, part: float) -> Iterator[None]:
    """A moment in the course of the move, or its end. The first part of it is before any daemon has written it down."""
    if part > _CHECKS:
        while not round_.begun() and not round_.over:
            yield
        part -= _CHECKS
    ends_s = time.monotonic() + part * round_.typical_s
    while time.monotonic() < ends_s and not round_.over:
        yield
    if round_.over:
        round_.notes.append("too late")


def revive(round_: Round, node: str) -> None:
    """Starts a daemon that was killed, or continues one that was stopped."""
    if round_.nodes.lab.daemon_pid(node) is None:
        round_.nodes.lab.start_daemon(node, timeout_s=PATIENCE_S)
    else:
        round_.nodes.lab.kill_daemon(node, signal.SIGCONT)


# ---------------------------------------------------------------- the kinds


def nothing(random: Random, job: ChaosJob) -> Fault:
    return Fault("none", "nothing", lambda round_: iter(()))


def at_point(action: str) -> Callable[[Random, ChaosJob], Fault]:
    """A fault point of a daemon."""

    def draw(random: Random, job: ChaosJob) -> Fault:
        role, points = random.choice([("source", SOURCE_POINTS), ("target", TARGET_POINTS)])
        if job.kind == jobs.NcclGpu.kind and random.random() < 0.4:
            points = DEVICE_POINTS[role]
        elif len(job.ranks) > 1 and random.random() < 0.4:
            role, points = "peer", PEER_POINTS
            if isinstance(job, jobs.Nccl):
                role, points = random.choice(["source", "peer"]), GATE_POINTS
        return _armed(role, random.choice(points), action, random.uniform(0.2, 8.0))

    return draw


def _armed(role: str, point: Point, action: str, pause_s: float, linger_s: float = 0.0) -> Fault:
    """`linger_s`: for points that may be reached when `migrator move` has ended."""

    def act(round_: Round) -> Iterator[None]:
        node, nodes = round_.node(role), round_.nodes
        nodes.fault(node, point, action)
        over_s: float | None = None
        while not nodes.fired(node):
            over_s = time.monotonic() if round_.over and over_s is None else over_s
            if over_s is not None and time.monotonic() >= over_s + linger_s:
                (nodes.run_dir(node) / "fault").unlink(missing_ok=True)
                round_.notes.append("not reached")
                return
            yield
        if action == "kill":
            for _ in lapse(_DEATH_S):  # another fault of the same round may have started it again already
                if nodes.lab.daemon_pid(node) is None:
                    break
                yield
            yield from lapse(pause_s / 4)
        elif action != "fail":
            yield from lapse(pause_s)
        if action == "wait":
            with contextlib.suppress(FileNotFoundError):
                (nodes.run_dir(node) / f"{point}.go").touch()
        else:
            revive(round_, node)

    words = f"{action} at {point} on the {role}" + (f" for {pause_s:.1f} s" if action in ("stop", "wait") else "")
    return Fault(f"point-{action}", words, act)


def daemon_killed(random: Random, job: ChaosJob) -> Fault:
    roles = random.choice([["source"], ["target"], ["peer"], ["source", "target"]])
    number = random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    part, down_s = random.uniform(0.1, 1.0), random.uniform(0.0, 3.0)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        for role in roles:
            round_.nodes.lab.kill_daemon(round_.node(role), number, timeout_s=PATIENCE_S)
        yield from lapse(down_s)
        for role in roles:
            revive(round_, round_.node(role))

    return Fault("daemon-kill", f"{number.name} to the daemon of the {' and the '.join(roles)} at {part:.2f}", act)


def daemon_stopped(random: Random, job: ChaosJob) -> Fault:
    role, part, down_s = (
        random.choice(["source", "target", "peer"]),
        random.uniform(0.1, 1.0),
        random.uniform(0.5, 12.0),
    )

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        round_.nodes.lab.kill_daemon(round_.node(role), signal.SIGSTOP, timeout_s=PATIENCE_S)
        yield from lapse(down_s)
        revive(round_, round_.node(role))

    return Fault("daemon-stop", f"SIGSTOP of the daemon of the {role} at {part:.2f} for {down_s:.1f} s", act)


def network_killed(random: Random, job: ChaosJob) -> Fault:
    role, part = random.choice(["source", "target", "peer"]), random.uniform(0.1, 1.0)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        pid = processes.network_process(round_.nodes, round_.node(role))
        if pid is None:
            round_.notes.append("no network process")
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return Fault("network-kill", f"kill of the network process of the {role} at {part:.2f}", act)


def criu_killed(random: Random, job: ChaosJob) -> Fault:
    part = random.uniform(0.3, 1.0)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        found = processes.criu(round_.nodes)
        while not found and not round_.over:
            yield
            found = processes.criu(round_.nodes)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            round_.notes.append("not reached")

    return Fault("criu-kill", f"kill of criu from {part:.2f} on", act)


def driver_killed(random: Random, job: ChaosJob) -> Fault:
    part = random.uniform(0.2, 1.1)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        if round_.driver is not None:
            round_.driver.kill()

    return Fault("driver-kill", f"kill of `migrator move` at {part:.2f}", act)


def driver_interrupted(random: Random, job: ChaosJob) -> Fault:
    part = random.uniform(0.3, 1.1)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        if round_.driver is not None:
            round_.driver.send_signal(signal.SIGINT)

    return Fault("driver-interrupt", f"Ctrl-C in `migrator move` at {part:.2f}", act, answer_is_open=True)


def link_cut(random: Random, job: ChaosJob) -> Fault:
    a, b = random.sample(["source", "target", "peer", OPERATOR], 2)
    part, down_s = random.uniform(0.1, 1.0), random.uniform(0.5, 8.0)

    def act(round_: Round) -> Iterator[None]:
        one, other = round_.node(a), round_.node(b)
        if one == other:
            round_.notes.append("one node")
            return
        yield from moment(round_, part)
        round_.nodes.lab.partition(one, other)
        yield from lapse(down_s)
        round_.nodes.lab.heal(one, other)

    return Fault("link-cut", f"no packets between {a} and {b} at {part:.2f} for {down_s:.1f} s", act)


def node_crashed(random: Random, job: ChaosJob) -> Fault:
    """A power cut: every process of the node is gone at once, and so is what was in memory. The disk remains."""
    role, part, down_s = random.choice(["source", "target", "peer"]), random.uniform(0.1, 1.0), random.uniform(0.0, 5.0)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        node = round_.node(role)
        for one in round_.everyone:
            moves = one is round_.job and node in (round_.source, round_.target)
            if moves or node in one.homes or any(node in one.places(rank) for rank in range(len(one.ranks))):
                round_.hit.add(one.name)
        round_.nodes.lab.crash(node)
        yield from lapse(down_s)
        round_.nodes.lab.boot(node, timeout_s=PATIENCE_S)

    return Fault("node-crash", f"crash of the {role} at {part:.2f}, back {down_s:.1f} s later", act)


def rank_killed(random: Random, job: ChaosJob) -> Fault:
    part, which = random.uniform(0.1, 1.1), random.choice(["source", "target"])

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        copies = round_.job.copies(round_.rank)
        places = round_.job.places(round_.rank)
        for pid, place in zip(copies, places, strict=False):
            if place == round_.node(which) or len(copies) == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

    return Fault("rank-kill", f"kill of the copy on the {which} at {part:.2f}", act, may_end=True)


def keeper_killed(random: Random, job: ChaosJob) -> Fault:
    part = random.uniform(0.1, 1.1)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        round_.job.ranks[round_.rank].process.kill()

    return Fault("keeper-kill", f"kill of the home keeper at {part:.2f}", act, may_end=True)


def refused(random: Random, job: ChaosJob) -> Fault:
    """A move that cannot work: to the node where the rank is, or to one whose daemon is down."""
    to_itself = random.random() < 0.5

    def act(round_: Round) -> Iterator[None]:
        if to_itself:
            round_.to = round_.source
            return
        round_.nodes.lab.kill_daemon(round_.target, timeout_s=PATIENCE_S)
        while not round_.over:
            yield
        revive(round_, round_.target)

    return Fault("refusal", "a move to its own node" if to_itself else "a target whose daemon is down", act)


def asked_twice(random: Random, job: ChaosJob) -> Fault:
    part = random.uniform(0.0, 1.0)

    def act(round_: Round) -> Iterator[None]:
        yield from moment(round_, part)
        other = next(node for node in round_.nodes.lab.nodes if node not in (round_.source, round_.target))
        second = round_.nodes.begin_move(round_.job.ranks[round_.rank], other, rank=round_.rank, more=SHORT_LEASE)
        with second:
            while second.poll() is None:
                yield
        round_.notes.append(f"the second: exit {second.returncode}")

    return Fault("second-move", f"a second `migrator move` of the same rank at {part:.2f}", act, answer_is_open=True)


def two(random: Random, job: ChaosJob) -> Fault:
    """Two faults at the same time: one makes the move fail, and the other disturbs the undo, or anything else."""
    first = random.choice([daemon_killed, network_killed, driver_killed, link_cut])(random, job)
    if random.random() < 0.5:
        role = random.choice(list(UNDO_POINTS))
        second = _armed(
            role,
            random.choice(UNDO_POINTS[role]),
            random.choice(["kill", "fail", "wait"]),
            random.uniform(0.2, 3.0),
            linger_s=7.0,
        )
    else:
        second = at_point(random.choice(["fail", "kill", "wait"]))(random, job)

    def act(round_: Round) -> Iterator[None]:
        acts = [first.act(round_), second.act(round_)]
        while acts:
            acts = [one for one in acts if next(one, acts) is not acts]
            yield

    return Fault("two", f"{first.words}, and {second.words}", act)
