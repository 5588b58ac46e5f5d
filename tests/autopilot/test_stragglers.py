"""The rank that the others wait for is named from counters alone, and nothing else is."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator

import pytest

from migrator.autopilot.stragglers import Counted, Group, Watch, waited_for

PERIOD_S, MARGIN_S = 0.5, 0.05
LEAST = 0.1


def group(*counts: tuple[int, int], nodes: str = "") -> Group:
    """Members with (early, late), each on a node of its own."""
    made = Group(len(counts))
    for member, (early, late) in enumerate(counts):
        made.add(member, Counted(f"r{member}", nodes[member] if nodes else f"n{member}", early, late))
    return made


def test_only_a_rank_that_is_behind_all_others_for_certain_is_waited_for() -> None:
    assert waited_for([group((6, 6), (5, 5), (6, 6))]) == "r1"
    assert waited_for([group((6, 6), (5, 6), (6, 6))]) is None  # it may have been read earlier
    assert waited_for([group((6, 6), (5, 5), (5, 5))]) is None
    assert waited_for([group((6, 6), (6, 6), (6, 6))]) is None
    assert waited_for([]) is None


def test_a_rank_that_waits_itself_is_not_the_cause() -> None:
    """r0 is slow; r1 waits for it in their pair, and is therefore late in its pair with r2."""
    first = group((5, 5), (6, 6))
    second = Group(2)
    second.add(0, Counted("r1", "n1", 3, 3))
    second.add(1, Counted("r2", "n2", 4, 4))
    assert waited_for([second]) == "r1"
    assert waited_for([first, second]) == "r0"


def test_two_causes_are_none() -> None:
    second = Group(2)
    second.add(0, Counted("r2", "n2", 3, 3))
    second.add(1, Counted("r3", "n3", 4, 4))
    assert waited_for([group((5, 5), (6, 6)), second]) is None


def test_a_member_that_two_nodes_claim_is_nobodys() -> None:
    made = group((6, 6), (5, 5))
    assert made.complete
    made.add(1, Counted("r1", "n9", 9, 9))
    assert not made.complete


# ---------------------------------------------------------------------- a job


class Simulated:
    """A job whose ranks compute and then meet in a collective. `compute(rank, now)` says how long a rank takes."""

    def __init__(self, ranks: int, compute: Callable[[int, float], float]) -> None:
        self.ranks, self._compute = ranks, compute
        self._arrived: list[list[float]] = [[] for _ in range(ranks)]
        self._met_s = 0.0

    def counts(self, now_s: float) -> list[int]:
        while self._met_s <= now_s + 1:
            arrived = [self._met_s + self._compute(rank, self._met_s) for rank in range(self.ranks)]
            for mine, at_s in zip(self._arrived, arrived, strict=True):
                mine.append(at_s)
            self._met_s = max(arrived)
        return [bisect_right(mine, now_s) for mine in self._arrived]

    def readings(self, first: int, count: int, skew_s: float = 0.0) -> Iterator[tuple[int, Group]]:
        chance = random.Random(first)
        for number in range(first, first + count):
            at_s = number * PERIOD_S + chance.random() * (PERIOD_S - MARGIN_S)
            # The node of rank 0 reads earlier than the others.
            early, late = self.counts(at_s), self.counts(at_s + MARGIN_S)
            early[0], late[0] = self.counts(at_s - skew_s)[0], self.counts(at_s + MARGIN_S - skew_s)[0]
            yield number, group(*zip(early, late, strict=True))


def watch(job: Simulated, first: int, count: int, into: Watch | None = None, skew_s: float = 0.0) -> Watch:
    made = into or Watch()
    for number, one in job.readings(first, count, skew_s):
        made.add(number, PERIOD_S, {1: one}, LEAST)
    return made


def named(made: Watch) -> str | None:
    return made.straggler.uid if made.straggler is not None else None


def noise(seed: int) -> Callable[[], float]:
    chance = random.Random(seed)
    return lambda: chance.uniform(0.9, 1.1)


def test_a_rank_that_becomes_slow_is_named_with_the_loss() -> None:
    jitter = noise(1)
    job = Simulated(4, lambda rank, now: (0.6 if rank == 2 and now > 40 else 0.3) * jitter())
    made = watch(job, 0, 80)
    assert named(made) is None
    watch(job, 80, 80, made)
    found = made.straggler
    assert found is not None
    assert (found.uid, found.node, found.others, found.confirmed) == ("r2", "n2", 3, True)
    assert 0.3 < found.lost_share < 0.5  # it takes twice as long: half of the time
    # About 40 s have passed since. Some are not counted, until it was recognised.
    assert 5 < found.lost_s < 20
    assert found.usual_per_s == pytest.approx(1 / 0.31, rel=0.15)


def test_a_rank_that_becomes_fast_again_is_not_named_any_more() -> None:
    job = Simulated(3, lambda rank, now: 0.6 if rank == 1 and 40 < now < 80 else 0.3)
    made = watch(job, 0, 160)
    assert named(made) == "r1"
    watch(job, 160, 120, made)
    assert named(made) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_uniform_job_raises_nothing(seed: int) -> None:
    jitter = noise(seed)
    made = Watch()
    job = Simulated(4, lambda rank, now: 0.25 * jitter())
    for first in range(0, 480, 60):
        assert watch(job, first, 60, made).straggler is None


def test_a_job_that_becomes_slower_as_a_whole_raises_nothing() -> None:
    jitter = noise(7)
    made = watch(Simulated(4, lambda rank, now: (0.2 if now < 40 else 0.6) * jitter()), 0, 200)
    assert made.straggler is None


def test_a_rank_that_is_always_last_raises_nothing_even_if_the_job_becomes_slower() -> None:
    """As a program that launches ahead of its GPU: its rank 0 writes logs and launches later, and delays no other rank."""
    job = Simulated(4, lambda rank, now: (0.2 if now < 40 else 0.4) * (1.5 if rank == 0 else 1.0))
    assert watch(job, 0, 240).straggler is None


def test_clocks_that_differ_name_nobody() -> None:
    """The node of rank 0 reads 30 ms before the others: in a job with short steps its rank seems to be behind."""
    for step_s in (0.011, 0.034, 0.2):
        made = Watch()
        job = Simulated(3, lambda rank, now, step_s=step_s: step_s if now < 20 else 1.3 * step_s)  # type: ignore[misc]
        assert watch(job, 0, 100, made, skew_s=0.03).straggler is None, step_s


def test_one_node_alone_confirms_nothing_but_that_of_the_rank_does() -> None:
    def made(nodes: str) -> bool:
        one = Watch()
        slow = Simulated(len(nodes), lambda rank, now: 0.6 if rank == 1 and now > 40 else 0.3)
        for number, read in slow.readings(0, 160):
            counts = [(member.early, member.late) for member in read.members.values()]
            one.add(number, PERIOD_S, {1: group(*counts, nodes=nodes)}, LEAST)
        assert one.straggler is not None
        return one.straggler.confirmed

    assert not made("ab")
    assert not made("aba")  # two ranks, but of one node
    assert made("abc")
    assert made("abb")  # its own node says that another of its ranks is ahead


def test_a_move_is_measured_anew_and_ends_the_alarm() -> None:
    job = Simulated(3, lambda rank, now: 0.6 if rank == 1 and 40 < now < 80 else 0.3)
    made = watch(job, 0, 160)
    assert named(made) == "r1"
    (read,) = [one for _, one in job.readings(160, 1)]
    read.members[1] = Counted("r1", "spare", read.members[1].early, read.members[1].late)
    made.add(160, PERIOD_S, {1: read}, LEAST)
    assert named(made) is None
    assert not made.settled


def test_incomplete_readings_are_not_taken_in() -> None:
    made = Watch()
    part = group((5, 5), (9, 9))
    part.nranks = 3
    made.add(1, PERIOD_S, {1: part}, LEAST)
    assert not made._readings
