"""Simulates an NCCL job for the tests of the cut: a running program, its gates, and the driver that stops it.

Threads work in user code, reach the gate, and launch. The next thread to act is random, and so is what runs while reports
and targets are in transit. The gates report only what a shim can count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.quiesce.cut import (
    Channel,
    Counts,
    Cut,
    Decision,
    Permission,
    Report,
    is_permitted,
    may_launch,
    next_targets,
)
from tests.protocol.test_cut_programs import (
    SEEDS,
    Group,
    Kind,
    Positions,
    Program,
    Thread,
    make_program,
    pipeline,
)
from tests.sampling import DRAWN, examples

TOIL = 3  # maximum number of steps in user code before a thread reaches the gate


class Hints(StrEnum):
    """How accurate the hints of a report are."""

    FULL = "it is known which threads will drive which communicator"
    PAST = "it is known which threads have driven which communicator"
    LIES = "whatever"


@dataclass
class Job:
    """A running program. A thread works in user code, reaches the gate, and launches when the gate allows it."""

    program: Program
    rng: Random
    blocking: bool = False  # a launch returns when all other members have launched, else at once
    hints: Hints = Hints.FULL
    members_known: bool = True  # the creator of a communicator knows its members at once, else when all have created it
    stuck: set[Thread] = field(default_factory=set)  # threads that never reach the gate

    def __post_init__(self) -> None:
        self.speeds = {thread: self.rng.choice((1, 5, 50)) for thread in self.program.threads}
        self.at: Positions = dict.fromkeys(self.program.threads, 0)
        self.launched = self.program.launched(self.at)
        self.users: dict[int, dict[str, frozenset[int]]] = {rank: {} for rank in self.program.ranks}
        self.numbers: dict[Thread, Counts] = {}  # of the operations in each thread's last launch
        self.toil: dict[Thread, int] = {}
        self.arrived: set[Thread] = set()
        self.gates: dict[int, Counts] = {}  # ranks whose gate is closed, and their targets
        self.permissions: Mapping[int, tuple[Permission, ...]] = {}
        self.passed: Counter[int] = Counter()  # by rank: groups that have passed the closed gate
        self.unseen: set[Thread] = set()  # threads that run but are reported as idle
        if self.hints is Hints.LIES:
            self.unseen = {thread for thread in self.program.threads if self.rng.random() < 0.5}
            for rank, comm in product(self.program.ranks, self.program.members):
                self.users[rank][comm] = frozenset(self.rng.sample(range(5), self.rng.randint(0, 3)))
        if self.hints is Hints.FULL:
            for (rank, thread), groups in self.program.threads.items():
                for group in groups:
                    self.note_users(rank, thread, group)

    def twin(self, seed: int) -> Job:
        """The same job, in the same state, with another future."""
        twin = deepcopy(self)
        twin.rng = Random(seed)
        twin.speeds = {thread: twin.rng.choice((1, 5, 50)) for thread in twin.speeds}
        return twin

    def note_users(self, rank: int, thread: int, group: Group) -> None:
        for channel in group.adds if self.hints is not Hints.LIES else ():
            self.users[rank][channel.comm] = self.users[rank].get(channel.comm, frozenset()) | {thread}

    def next_group(self, thread: Thread) -> Group | None:
        groups = self.program.threads[thread]
        return groups[self.at[thread]] if self.at[thread] < len(groups) else None

    def blocked(self, thread: Thread) -> bool:
        """Whether its last launch has not returned."""
        last = self.numbers.get(thread, {}) if self.blocking else {}
        return any(self.launched[end][c] < number for c, number in last.items() for end in self.program.ends(c))

    def waiting(self, thread: Thread) -> bool:
        """Whether it waits for another thread of its rank."""
        group = self.next_group(thread)
        if group is None:
            return False
        rank = thread[0]
        return any(
            self.at[rank, other] < needed or (self.at[rank, other] == needed and self.blocked((rank, other)))
            for other, needed in group.after.items()
        )

    def working(self, thread: Thread) -> bool:
        """Whether it is in user code, on its way to the gate."""
        idle = self.next_group(thread) is None or self.waiting(thread) or self.blocked(thread)
        return thread not in self.arrived and not idle

    def passes(self, thread: Thread) -> bool:
        group, rank = self.next_group(thread), thread[0]
        if thread not in self.arrived or group is None:
            return False
        if rank not in self.gates:
            return True
        if may_launch(self.launched[rank], self.gates[rank], group.adds):
            return True
        known = Report(self.launched[rank], passed=self.passed[rank])
        return is_permitted(known, thread[1], self.permissions.get(rank, ()))

    def choices(self) -> list[Thread]:
        return [t for t in self.program.threads if (self.working(t) and t not in self.stuck) or self.passes(t)]

    def step(self) -> bool:
        """Lets one thread do one step. Returns False if none can."""
        choices = self.choices()
        if not choices:
            return False
        thread = self.rng.choices(choices, [self.speeds[thread] for thread in choices])[0]
        if thread in self.arrived:
            self.launch(thread, self.program.threads[thread][self.at[thread]])
        elif self.toil.setdefault(thread, self.rng.randint(0, TOIL)):
            self.toil[thread] -= 1
        else:
            self.arrived.add(thread)
            del self.toil[thread]
        return True

    def launch(self, thread: Thread, group: Group) -> None:
        rank = thread[0]
        self.arrived.remove(thread)
        self.passed[rank] += rank in self.gates
        self.at[thread] += 1
        self.launched[rank] += group.adds
        self.numbers[thread] = {channel: self.launched[rank][channel] for channel in group.adds}
        self.note_users(rank, thread[1], group)

    def run(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            self.step()

    def ended(self, rank: int) -> bool:
        return all(self.next_group(thread) is None for thread in self.program.threads if thread[0] == rank)

    def report(self, rank: int) -> Report:
        mine = [thread for thread in self.program.threads if thread[0] == rank]
        return Report(
            launched=dict(self.launched[rank]),
            held={t[1]: dict(self.program.threads[t][self.at[t]].adds) for t in mine if t in self.arrived},
            members={comm: self.known_members(comm, rank) for comm in self.program.members if self.created(comm, rank)},
            users=dict(self.users[rank]),
            running=frozenset(t[1] for t in mine if self.working(t) and t not in self.unseen),
            ended=self.ended(rank),
            passed=self.passed[rank],
        )

    def created(self, comm: str, rank: int) -> bool:
        return self.launched[rank][Channel(comm)] > 0

    def known_members(self, comm: str, rank: int) -> tuple[int | None, ...]:
        members = self.program.members[comm]
        known = self.members_known or all(self.created(comm, member) for member in members)
        return tuple(member if known or member == rank else None for member in members)

    def shuffled(self) -> list[int]:
        return self.rng.sample(self.program.ranks, len(self.program.ranks))

    def close(self) -> None:
        """Closes the gates one after the other, while the rest of the job keeps running."""
        for rank in self.shuffled():
            self.run(6)
            self.gates[rank] = {}

    def rounds(self) -> Iterator[Cut]:
        """The driver: reports and targets are transferred one by one while the job runs. A rank that may launch nothing is
        asked now and then, and a gate that knows all that it has to know is told nothing."""
        cut: Cut | None = None
        reports: dict[int, Report] = {}
        while True:
            moving = cut.moving() if cut else None
            fresh = {}
            for rank in self.shuffled():
                self.run(1)
                if moving is None or rank in moving or self.rng.random() < 0.1:
                    fresh[rank] = self.report(rank)
            reports = {**reports, **fresh}
            cut = next_targets(reports, cut)
            yield cut
            for rank in self.shuffled():
                self.run(1)
                wanted, permissions = cut.wanted.get(rank, {}), cut.permissions.get(rank, ())
                if wanted.items() <= self.gates[rank].items() and {*permissions} <= {*self.permissions.get(rank, ())}:
                    continue
                self.gates[rank] = wanted
                self.permissions = {**self.permissions, rank: permissions}
            self.step()

    def hold(self) -> Cut:
        """Drives the job, whose gates are closed, to its cut. In every round a thread makes progress towards its next group
        or is allowed to pass, or the round is the second equal one. That bounds the number of rounds."""
        rounds = (TOIL + 4) * sum(map(len, self.program.threads.values())) + 4
        cut = last = next_targets({})
        for cut in islice(self.rounds(), rounds):
            assert all(cut.targets.get(channel, 0) >= n for channel, n in last.targets.items()), "a target fell"
            last = cut
            if cut.decision is not Decision.RUN_ON:
                break
        return cut

    def open(self) -> None:
        self.gates.clear()
        self.permissions = {}

    def finish(self) -> None:
        """Runs the job to its end, with open gates."""
        while self.step():
            pass
        assert all(self.ended(rank) for rank in self.program.ranks), "the job stands still"
        assert not any(map(self.blocked, self.program.threads))


def judge(job: Job, cut: Cut) -> None:
    """Checks what holds for every cut, least or not: counts are equal and stay so, no thread waits for a later operation."""
    assert cut.decision is Decision.REACHED, cut.reason
    there = dict(job.at)
    assert not job.program.uneven(there), "an end lacks an operation that another has launched"
    while job.step():
        pass
    assert job.at == there, "a rank went on behind the cut"
    assert not any(map(job.blocked, job.program.threads)), "a thread waits for an operation behind the cut"


@pytest.mark.parametrize("kind", Kind)
@settings(DRAWN, max_examples=examples(60))
@given(program=SEEDS, seed=SEEDS, blocking=st.booleans())
def test_program_with_open_gates_runs_to_its_end(kind: Kind, program: int, seed: int, blocking: bool) -> None:
    Job(make_program(Random(program), kind), Random(seed), blocking).finish()


@settings(DRAWN, max_examples=examples(20))
@given(seed=SEEDS, blocking=st.booleans())
def test_pipeline_with_open_gates_runs_to_its_end(seed: int, blocking: bool) -> None:
    Job(pipeline(), Random(seed), blocking).finish()


def starts(kind: Kind, rng: Random, seed: int, *, blocking: bool, hints: Hints = Hints.FULL) -> Job:
    """A job somewhere in its program, whose gates have just been closed."""
    job = Job(make_program(rng, kind), Random(seed), blocking, hints)
    job.run(100)
    job.close()
    return job


def held_there(job: Job) -> Positions:
    """Stops the job, checks the cut and that the job continues from it, and returns the positions at the cut."""
    cut = job.hold()
    judge(job, cut)
    there = dict(job.at)
    job.open()
    job.finish()
    return there
