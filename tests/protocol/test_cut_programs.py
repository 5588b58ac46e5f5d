"""Programs for the tests of the cut: threads of ranks that launch groups of NCCL operations and cannot deadlock.

A random program is one global order of operations, projected on ranks and threads. What a thread does depends only on
operations earlier in that order, so the program ends however the threads interleave. If it blocks for ever, the gates are at
fault. The tests know the program and thus the least cut, which `migrator/quiesce/cut.py` has to find without that knowledge.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.quiesce.cut import Channel
from tests.sampling import DRAWN, examples

SEEDS = st.integers(0, 2**32 - 1)
Thread = tuple[int, int]  # rank, thread
Positions = dict[Thread, int]  # groups launched by each thread


@dataclass
class Group:
    """What a thread launches as a unit, once the threads in `after` have launched that many groups."""

    adds: Counter[Channel]
    after: dict[int, int] = field(default_factory=dict)


class Kind(StrEnum):
    ALONE = "one thread a rank"
    OWN = "each communicator is driven by one thread of a rank"
    HANDOVER = "threads of a rank take turns, as main and autograd do"
    WILD = "any thread drives any communicator, in an order that the rank keeps"


@dataclass
class Program:
    members: dict[str, tuple[int, ...]]
    threads: dict[Thread, list[Group]] = field(default_factory=dict)
    # By rank and channel: the thread and the group of each operation.
    order: dict[tuple[int, Channel], list[tuple[int, int]]] = field(default_factory=dict)

    def give(
        self, rank: int, thread: int, channel: Channel, after: dict[int, int] | None = None, *, fuse: bool
    ) -> None:
        """Adds the next operation of a thread, to its last group or as a new one."""
        groups = self.threads.setdefault((rank, thread), [])
        if not (fuse and groups):
            groups.append(Group(Counter()))
        groups[-1].adds[channel] += 1
        groups[-1].after |= after or {}
        self.order.setdefault((rank, channel), []).append((thread, len(groups)))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.threads}))

    def ends(self, channel: Channel) -> tuple[int, ...]:
        return channel.pair or self.members[channel.comm]

    def launched(self, positions: Positions) -> dict[int, Counter[Channel]]:
        counts = {rank: Counter[Channel]() for rank in self.ranks}
        for (rank, thread), position in positions.items():
            for group in self.threads[rank, thread][:position]:
                counts[rank] += group.adds
        return counts

    def uneven(self, positions: Positions) -> list[tuple[Channel, int, int]]:
        """The members that lack operations which another member has launched, and how many that one has."""
        counts = self.launched(positions)
        channels = {channel for some in counts.values() for channel in some}
        most = {channel: max(counts[rank][channel] for rank in self.ends(channel)) for channel in channels}
        return [(c, rank, most[c]) for c in most for rank in self.ends(c) if counts[rank][c] < most[c]]

    def in_order(self, positions: Positions) -> bool:
        return all(
            positions[rank, other] >= needed
            for (rank, thread), groups in self.threads.items()
            for group in groups[: positions[rank, thread]]
            for other, needed in group.after.items()
        )

    def advance(self, at: Positions, rank: int, thread: int, position: int) -> None:
        """Advances a thread, and the other threads of its rank as far as it depends on them."""
        todo = [(thread, position)]
        while todo:
            thread, position = todo.pop()
            for group in self.threads[rank, thread][at[rank, thread] : position]:
                todo += group.after.items()
            at[rank, thread] = max(at[rank, thread], position)

    def least(self, start: Positions) -> Positions:
        """The least cut from `start`, given the program: every rank that lacks an operation runs until it has it."""
        at = dict(start)
        while lacking := self.uneven(at):
            for channel, rank, most in lacking:
                for thread, position in self.order[rank, channel][:most]:
                    self.advance(at, rank, thread, position)
        return at

    def least_by_force(self, start: Positions) -> Positions:
        """The same by brute force: the minimum, for each thread, over all consistent cuts."""
        spans = [range(start[thread], len(groups) + 1) for thread, groups in self.threads.items()]
        cuts = [dict(zip(self.threads, spot, strict=True)) for spot in product(*spans)]
        good = [cut for cut in cuts if self.in_order(cut) and not self.uneven(cut)]
        return {thread: min(cut[thread] for cut in good) for thread in self.threads}


def make_program(rng: Random, kind: Kind, ranks: int = 5, comms: int = 8, operations: int = 40) -> Program:
    """A random program of at most `operations` operations, in a global order that every rank and thread follows."""
    everyone = range(rng.randint(2, ranks))
    members = {
        f"c{index}": tuple(sorted(rng.sample(everyone, rng.randint(2, len(everyone)))))
        for index in range(rng.randint(1, comms))
    }
    threads = {rank: 1 if kind is Kind.ALONE else rng.randint(1, 3) for rank in everyone}
    driver = {(rank, comm): rng.randrange(threads[rank]) for comm, some in members.items() for rank in some}
    program = Program(members, {(rank, thread): [] for rank in everyone for thread in range(threads[rank])})
    latest: dict[int, int] = {}  # by rank: the thread with its last operation
    drove: dict[tuple[int, str], int] = {}  # the thread that last used a communicator

    def give(rank: int, channel: Channel) -> None:
        taking_turns = kind in {Kind.HANDOVER, Kind.WILD}
        thread = rng.randrange(threads[rank]) if taking_turns else driver[rank, channel.comm]
        waits_for = set()
        if kind is Kind.HANDOVER:
            waits_for = {latest.get(rank, thread)}
        elif kind is Kind.WILD:
            waits_for = {drove.get((rank, channel.comm), thread)}
            waits_for |= {rng.randrange(threads[rank])} if rng.random() < 0.3 else set()
        after = {other: len(program.threads[rank, other]) for other in waits_for - {thread}}
        # If threads share a communicator, only the last group of the rank may grow, to keep the order.
        fuse = (latest.get(rank) == thread or kind is Kind.OWN) and rng.random() < 0.35
        program.give(rank, thread, channel, after, fuse=fuse)
        latest[rank] = drove[rank, channel.comm] = thread

    for _ in range(rng.randint(1, operations)):
        comm = rng.choice(sorted(members))
        sender, receiver = rng.sample(members[comm], 2)
        created = any(channel.comm == comm for _, channel in program.order)
        channel = Channel(comm, (sender, receiver) if created and rng.random() < 0.5 else None)
        for rank in program.ends(channel):
            give(rank, channel)
    return program


MAIN, AUTOGRAD = 0, 1


def pipeline(stages: int = 3, batches: int = 4, steps: int = 2) -> Program:
    """Training in 1F1B order: two tensor-parallel ranks per stage, grouped sends and receives, backward in its own thread."""
    ranks = range(2 * stages)
    members: dict[str, tuple[int, ...]] = {f"tp{stage}": (2 * stage, 2 * stage + 1) for stage in range(stages)}
    members |= {f"pp{side}": tuple(range(side, len(ranks), 2)) for side in (0, 1)}
    program = Program({**members, "world": tuple(ranks)})
    for rank in ranks:
        for _ in range(steps):
            train(program, rank, stages, batches)
    return program


def train(program: Program, rank: int, stages: int, batches: int) -> None:
    """One step of one rank. Main and autograd threads take turns."""
    here, side = divmod(rank, 2)
    above, below = here + 1, here - 1
    tp, world = Channel(f"tp{here}"), Channel("world")

    def give(channel: Channel, thread: int = MAIN, *, fuse: bool = False) -> None:
        other = AUTOGRAD if thread == MAIN else MAIN
        program.give(rank, thread, channel, {other: len(program.threads.get((rank, other), []))}, fuse=fuse)

    def exchange(*pairs: tuple[int, int]) -> None:
        """One group of sends and receives, without those beyond the first and last stage."""
        there = [(2 * a + side, 2 * b + side) for a, b in pairs if min(a, b) >= 0 and max(a, b) < stages]
        for index, pair in enumerate(there):
            give(Channel(f"pp{side}", pair), fuse=index > 0)

    warm_up = min(batches, stages - 1 - here)
    for _ in range(warm_up):
        exchange((below, here))
        give(tp)
        exchange((here, above))
    exchange((below, here))
    for batch in range(batches - warm_up):
        give(tp)
        exchange((here, above), (above, here))
        give(tp, AUTOGRAD)
        last = batch == batches - warm_up - 1
        exchange((here, below), *([] if last else [(below, here)]))
    for _ in range(warm_up):
        exchange((above, here))
        give(tp, AUTOGRAD)
        exchange((here, below))
    give(world, AUTOGRAD)
    give(world)


@pytest.mark.parametrize("kind", Kind)
@settings(DRAWN, max_examples=examples(100))
@given(rng=SEEDS.map(Random))
def test_least_cut_equals_the_minimum_of_all_consistent_cuts(kind: Kind, rng: Random) -> None:
    program = make_program(rng, kind, ranks=3, comms=3, operations=5)
    start = dict.fromkeys(program.threads, 0)
    for rank, thread in program.threads:
        program.advance(start, rank, thread, rng.randint(0, len(program.threads[rank, thread])))
    least = program.least(start)
    assert program.in_order(least)
    assert least == program.least_by_force(start)
