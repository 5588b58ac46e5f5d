"""Mutation tests of the cut: each rule is broken on purpose, and the simulated jobs have to detect it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from random import Random

import pytest

from migrator.quiesce import cut as rules
from migrator.quiesce.cut import (
    Behind,
    Certainty,
    Channel,
    Counts,
    Cut,
    Decision,
    Permission,
    Report,
    is_permitted,
    next_targets,
)
from tests.protocol.test_cut_job import Hints, held_there, starts
from tests.protocol.test_cut_programs import Kind
from tests.protocol.test_cut_rules import test_launch_between_two_rounds_delays_the_guess

Reports = Mapping[int, Report]
Scene = tuple[Kind, Hints, bool]  # how threads are used, what is known of them, whether launches block
EXACT: tuple[Scene, ...] = tuple(
    (kind, hints, blocking)
    for kind, hints in ((Kind.ALONE, Hints.PAST), (Kind.OWN, Hints.FULL), (Kind.HANDOVER, Hints.PAST))
    for blocking in (False, True)
)
RACE: tuple[Scene, ...] = (
    (Kind.OWN, Hints.FULL, True),
)  # threads that wait for other ranks beside threads that wait at the gate


def caught(scenes: tuple[Scene, ...] = EXACT, seeds: int = 120) -> bool:
    """Whether some job reaches no cut, an inconsistent one, one beyond the least, or different ones from the same start."""
    for seed in range(seeds):
        kind, hints, blocking = scenes[seed % len(scenes)]
        exact = starts(kind, Random(seed), seed, blocking=blocking, hints=hints)
        try:
            assert held_there(exact.twin(1)) == exact.program.least(exact.at)
            if scenes is EXACT:
                wild = starts(Kind.WILD, Random(seed), seed, blocking=blocking)
                twins = wild.twin(1), wild.twin(2)
                guessed = [bool(twin.hold().guesses) for twin in twins]
                assert any(guessed) or twins[0].at == twins[1].at
        except AssertionError:
            return True
    return False


def test_unmodified_rules_pass() -> None:
    assert not caught()


# ------------------------------------------------------------ the gate's rule


def pass_if_all_are_behind(launched: Counts, targets: Counts, group: Counts) -> bool:
    """A group waits until all its channels are below their targets."""
    return all(launched.get(channel, 0) < targets.get(channel, 0) for channel in group)


def pass_one_more(launched: Counts, targets: Counts, group: Counts) -> bool:
    """The gate is off by one."""
    return any(launched.get(channel, 0) <= targets.get(channel, 0) for channel in group)


def pass_any_where_the_rank_is_behind(launched: Counts, targets: Counts, group: Counts) -> bool:
    """All threads of a rank that is behind on any channel pass."""
    return any(launched.get(channel, 0) < target for channel, target in targets.items())


GATES = (pass_if_all_are_behind, pass_one_more, pass_any_where_the_rank_is_behind)


@pytest.mark.parametrize("broken", GATES)
def test_broken_gate_rule_is_detected(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., bool]) -> None:
    monkeypatch.setattr("tests.protocol.test_cut_job.may_launch", broken)
    assert caught()


# ------------------------------------------------------------ what is computed from the reports


def forget_the_last_round(reports: Reports, last: Cut | None = None) -> Cut:
    """The targets of the last round are forgotten."""
    return next_targets(reports, last and replace(last, targets={}))


def wait_for_nobody(reports: Reports, last: Cut | None = None) -> Cut:
    """Threads on their way to the gate are not waited for."""
    return next_targets({rank: replace(report, running=frozenset()) for rank, report in reports.items()}, last)


def any_thread_will_do(reports: Reports, last: Cut | None = None) -> Cut:
    """It is ignored which threads have used a communicator."""
    threads = {rank: frozenset(report.held) | report.running for rank, report in reports.items()}
    blurred = {r: replace(report, users=dict.fromkeys(report.users, threads[r])) for r, report in reports.items()}
    return next_targets(blurred, last)


def collectives_alone(reports: Reports, last: Cut | None = None) -> Cut:
    """Sends and receives are not counted."""

    def without(counts: Counts) -> Counts:
        return {channel: count for channel, count in counts.items() if channel.pair is None}

    return next_targets({r: replace(report, launched=without(report.launched)) for r, report in reports.items()}, last)


def let_everybody_on(reports: Reports, last: Cut | None = None) -> Cut:
    """All waiting threads pass if any rank is behind."""
    cut = next_targets(reports, last)
    targets = dict(cut.targets)
    for report in reports.values() if cut.behind else ():
        for group in report.held.values():
            for channel, n in group.items():
                targets[channel] = max(targets.get(channel, 0), report.launched.get(channel, 0) + n)
    return replace(cut, targets=targets, wanted=dict.fromkeys(reports, targets))


def let_nobody_on(reports: Reports, last: Cut | None = None) -> Cut:
    """A thread that waits before the missing operation never passes."""
    cut = next_targets(reports, last)
    most: dict[Channel, int] = {}
    for report in reports.values():
        for channel, count in report.launched.items():
            most[channel] = max(most.get(channel, 0), count)
    return replace(cut, targets=most, permissions={}, wanted=dict.fromkeys(reports, most))


def stop_when_all_are_held(reports: Reports, last: Cut | None = None) -> Cut:
    """The cut counts as reached when no thread runs."""
    cut = next_targets(reports, last)
    return cut if any(report.running for report in reports.values()) else replace(cut, decision=Decision.REACHED)


def forget_who_is_late(reports: Reports, last: Cut | None = None) -> Cut:
    """A rank that has not reached a target is not asked, nor told."""
    cut = next_targets(reports, last)
    return replace(cut, wanted={rank: counts for rank, counts in cut.wanted.items() if rank != max(cut.wanted)})


ROUNDS = (
    forget_the_last_round,
    wait_for_nobody,
    any_thread_will_do,
    collectives_alone,
    let_everybody_on,
    let_nobody_on,
    forget_who_is_late,
    stop_when_all_are_held,
)


@pytest.mark.parametrize("broken", ROUNDS)
def test_broken_computation_of_targets_is_detected(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Cut]) -> None:
    monkeypatch.setattr("tests.protocol.test_cut_job.next_targets", broken)
    assert caught()


# ------------------------------------------------------------ which threads pass


def certain_of_everything(report: Report, late: Behind, targets: Counts) -> tuple[Certainty, Iterable[int]]:
    """A guess is made although there is progress."""
    return Certainty.SURE, leading(report, late, targets)[1]


def never_guess(report: Report, late: Behind, targets: Counts) -> tuple[Certainty, Iterable[int]]:
    """Threads pass only if it is certain that they have to."""
    certainty, threads = leading(report, late, targets)
    return certainty, threads if certainty is Certainty.SURE else ()


def forget_idle_users(report: Report, late: Behind, targets: Counts) -> tuple[Certainty, Iterable[int]]:
    """Idle threads, which wait for another thread, are ignored."""
    awake = report.held.keys() | report.running
    users = {comm: frozenset(awake & some) for comm, some in report.users.items()}
    return leading(replace(report, users=users), late, targets)


leading = rules._leading
CHOICES = (certain_of_everything, never_guess, forget_idle_users)


@pytest.mark.parametrize("broken", CHOICES)
def test_broken_choice_of_threads_is_detected(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., object]) -> None:
    monkeypatch.setattr(rules, "_leading", broken)
    assert caught()


# ------------------------------------------------------------ whether there is progress


def look_once(reports: Reports, before: Reports, behind: Iterable[int], targets: Counts) -> bool:
    """One round is considered enough to see that there is no progress."""
    return stands_still(reports, reports, behind, targets)


def look_at_the_late(reports: Reports, before: Reports, behind: Iterable[int], targets: Counts) -> bool:
    """Launches of the other ranks since the first round are ignored."""
    return stands_still(reports, {**reports, **{rank: before[rank] for rank in behind}}, behind, targets)


stands_still = rules._stands_still


def test_premature_detection_of_no_progress_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_stands_still", look_once)
    assert caught(RACE, 400)


def test_ignored_launches_of_other_ranks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs meet this too rarely."""
    monkeypatch.setattr(rules, "_stands_still", look_at_the_late)
    with pytest.raises(AssertionError):
        test_launch_between_two_rounds_delays_the_guess()


# ------------------------------------------------------------ permissions


def permit_for_ever(report: Report, thread: int, permissions: Iterable[Permission]) -> bool:
    """A permission does not end when the operation is reached."""
    return any(one.thread in (None, thread) and (report.passed or 0) < one.passed for one in permissions)


def permit_any_thread(report: Report, thread: int, permissions: Iterable[Permission]) -> bool:
    """A permission for one thread is one for all."""
    return is_permitted(report, thread, [one._replace(thread=None) for one in permissions])


@pytest.mark.parametrize("broken", [permit_for_ever, permit_any_thread])
def test_broken_rule_of_permissions_is_detected(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., bool]) -> None:
    monkeypatch.setattr("tests.protocol.test_cut_job.is_permitted", broken)
    assert caught()
