"""The rules of the cut one by one, in jobs small enough to read, and the words that a person gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from migrator.quiesce.cut import Channel, Counts, Cut, Decision, Report, may_launch, next_targets

TP, DP, PP = Channel("tp0"), Channel("dp0"), Channel("pp0")
SEND = Channel("pp0", (0, 1))
PAIR = {"tp0": (0, 1), "dp0": (0, 1), "pp0": (0, 1)}
MAIN, AUTOGRAD, OTHER = 1, 2, 3
BOTH = frozenset({MAIN, AUTOGRAD})


def rank(
    launched: Counts,
    held: dict[int, Counts] | None = None,
    *,
    users: frozenset[int] = frozenset({MAIN}),
    running: frozenset[int] = frozenset(),
    ended: bool = False,
) -> Report:
    """A rank of a job of two, whose `users` have used every communicator."""
    return Report(launched, held or {}, PAIR, dict.fromkeys(PAIR, users), running, ended)


def looked_twice(reports: dict[int, Report]) -> Cut:
    return next_targets(reports, next_targets(reports))


def test_a_job_that_has_launched_nothing_is_at_its_cut() -> None:
    assert next_targets({0: rank({}, {MAIN: {TP: 1}}), 1: rank({})}).decision is Decision.REACHED


def test_a_closed_gate_lets_nothing_pass() -> None:
    assert not may_launch({}, {}, {TP: 1})
    assert not may_launch({TP: 7}, {TP: 7}, {TP: 1})


def test_a_group_passes_whole_for_one_operation_that_another_rank_has_launched() -> None:
    assert may_launch({TP: 6, DP: 3}, {TP: 7, DP: 3}, {TP: 1, DP: 2})


def test_what_a_group_took_with_it_becomes_a_target() -> None:
    cut = next_targets({0: rank({TP: 7, DP: 5}), 1: rank({TP: 7, DP: 3})})
    assert cut.targets == {TP: 7, DP: 5}
    assert [(late.rank, late.channel, late.target) for late in cut.behind] == [(1, DP, 5)]


def test_even_counts_are_the_cut_whatever_the_threads_do() -> None:
    """One in user code will be held when it comes: no channel is below its target."""
    cut = next_targets({0: rank({TP: 7}, {MAIN: {DP: 1}}), 1: rank({TP: 7}, running=frozenset({MAIN}))})
    assert (cut.decision, cut.behind) == (Decision.REACHED, ())
    assert cut.reason == "every rank has launched the same operations"


def test_a_thread_held_at_another_communicator_is_let_on_and_its_peers_follow() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}})})
    assert cut.targets == {TP: 7, DP: 1}
    assert not cut.guessed


def test_a_rank_that_is_not_behind_is_not_let_on() -> None:
    cut = next_targets({0: rank({TP: 7}, {MAIN: {DP: 1}}), 1: rank({TP: 6}, running=frozenset({MAIN}))})
    assert cut.targets == {TP: 7}


def test_a_thread_that_runs_is_waited_for_though_another_is_held() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH, running=frozenset({MAIN}))}
    assert looked_twice(reports).targets == {TP: 7}


def test_once_the_driver_takes_the_running_for_idle_the_held_thread_is_let_on() -> None:
    late = rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH, running=frozenset({MAIN}))
    cut = looked_twice({0: rank({TP: 7}), 1: replace(late, running=frozenset())})
    assert cut.targets == {TP: 7, DP: 1}
    assert cut.guessed == {1}


def test_an_idle_thread_is_taken_to_wait_for_the_held_one_only_at_the_second_look() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)}
    first = next_targets(reports)
    assert first.targets == {TP: 7}
    assert next_targets(reports, first).targets == {TP: 7, DP: 1}


def test_a_rank_in_user_code_that_is_not_behind_hinders_no_guess() -> None:
    held = rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)
    first = next_targets({0: rank({TP: 7}, running=frozenset({MAIN})), 1: held})
    assert next_targets({0: rank({TP: 7}, {MAIN: {TP: 1}}), 1: held}, first).targets == {TP: 7, DP: 1}


def test_a_launch_between_two_looks_is_a_third_look() -> None:
    """Rank 1's idle thread waited for rank 0's operation, and may be on its way by now."""
    held = rank({TP: 6, PP: 1}, {AUTOGRAD: {DP: 1}}, users=BOTH)
    first = next_targets({0: rank({TP: 7}), 1: held})
    second = next_targets({0: rank({TP: 7, PP: 1}), 1: held}, first)
    assert second.targets == {TP: 7, PP: 1}
    assert next_targets({0: rank({TP: 7, PP: 1}), 1: held}, second).targets == {TP: 7, PP: 1, DP: 1}


def test_of_several_held_threads_those_go_on_that_have_used_the_communicator() -> None:
    groups: dict[int, Counts] = {MAIN: {DP: 1}, AUTOGRAD: {PP: 1}, OTHER: {SEND: 1}}
    certain = {0: rank({TP: 7}), 1: rank({TP: 6}, groups)}
    assert next_targets(certain).targets == {TP: 7, DP: 1}
    guess = {0: rank({TP: 7}), 1: rank({TP: 6}, groups, users=BOTH)}
    assert looked_twice(guess).targets == {TP: 7, DP: 1, PP: 1}


def test_a_thread_at_the_very_operation_keeps_the_others_back_though_it_is_new_to_the_communicator() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}, AUTOGRAD: {TP: 1}})})
    assert cut.targets == {TP: 7}


def test_a_thread_that_was_let_on_has_to_launch_before_the_cut_is_reached() -> None:
    """Rank 1's two threads went on by a guess; the first led there, the second is still on its way through the gate."""
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}, AUTOGRAD: {PP: 1}}, users=BOTH)}
    cut = looked_twice(reports)
    even = {TP: 7, DP: 1}
    cut = next_targets({0: rank(even), 1: rank(even, {AUTOGRAD: {PP: 1}}, users=BOTH)}, cut)
    assert cut.decision is Decision.RUN_ON
    assert {(late.rank, late.channel) for late in cut.behind} == {(0, PP), (1, PP)}
    even = {TP: 7, DP: 1, PP: 1}
    assert next_targets({0: rank(even), 1: rank(even)}, cut).decision is Decision.REACHED


def test_a_member_that_has_not_created_a_communicator_yet_is_behind() -> None:
    creator = Report({TP: 1}, members={"tp0": (0, 2)})
    cut = next_targets({0: creator, 1: Report({}), 2: Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)})})
    assert [late.rank for late in cut.behind] == [2]
    assert cut.targets == {TP: 1, DP: 1}


def test_while_members_are_unknown_any_rank_may_be_one() -> None:
    creator = Report({TP: 1}, members={"tp0": (0, None)})
    reports = {0: creator, 1: Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)}), 2: Report({}, members={"dp0": (1, 2)})}
    assert looked_twice(reports).targets == {TP: 1, DP: 1}
    reports[2] = Report({TP: 1}, members={"tp0": (None, 2), "dp0": (1, 2)})
    assert next_targets(reports).decision is Decision.REACHED


def test_a_member_that_no_rank_can_be_is_waited_for() -> None:
    """A rank whose report is missing."""
    cut = looked_twice({0: Report({TP: 1}, {MAIN: {DP: 1}}, members={"tp0": (0, None)})})
    assert (cut.decision, cut.targets) == (Decision.RUN_ON, {TP: 1})
    assert cut.reason.startswith("an unknown rank has not reached operation 1 of communicator tp0")


def test_an_unknown_member_is_looked_for_only_when_nothing_else_is_left() -> None:
    creator = Report({TP: 1, PP: 1}, members={"tp0": (0, None), "pp0": (0, 2)})
    bystander = Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)})
    member = Report({}, {MAIN: {DP: 1}, OTHER: {Channel("ep0"): 1}}, {"ep0": (2, 3)}, {"pp0": frozenset({MAIN, OTHER})})
    third = Report({}, members={"ep0": (2, 3)})
    cut = looked_twice({0: creator, 1: bystander, 2: member, 3: third})
    assert cut.guessed == {2}


def test_a_rank_that_has_ended_ends_the_attempt() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, ended=True)})
    assert cut.decision is Decision.NEVER
    assert cut.reason == "rank 1 has not reached operation 7 of communicator tp0: it has ended"


def test_a_rank_that_has_ended_with_everything_done_is_no_hindrance() -> None:
    assert next_targets({0: rank({TP: 7}), 1: rank({TP: 7}, ended=True)}).decision is Decision.REACHED


WORDS = {
    "rank 1 has not reached operation 1207 of communicator tp0: it is in user code": {
        0: rank({TP: 1207}),
        1: rank({TP: 1206}),
    },
    "rank 1 has not reached receive 4 from rank 0 on communicator pp0: it is in user code": {
        0: rank({SEND: 4}),
        1: rank({SEND: 3}, running=frozenset({MAIN})),
    },
    "rank 0 has not reached send 4 to rank 1 on communicator pp0: it has just been let on": {
        0: rank({SEND: 3}, {MAIN: {SEND: 1}}),
        1: rank({SEND: 4}),
    },
    "rank 1 has not reached operation 2 of communicator tp0: it waits at the gate": {
        0: rank({TP: 2}),
        1: rank({TP: 1}, {MAIN: {DP: 1}}),
    },
    "rank 1 has not reached operation 2 of communicator tp0: it does not answer": {0: rank({TP: 2})},
    "rank 1 has not reached operation 2 of communicator tp0: it is in user code, perhaps waiting for rank 0 (and 1 more)": {
        0: rank({TP: 2, DP: 1}, {MAIN: {DP: 1}}),
        1: rank({TP: 1, DP: 2}),
    },
    "rank 1 has not reached operation 1 of communicator tp0: it may be one of the members that have yet to create it": {
        0: Report({TP: 1}, members={"tp0": (0, None)}),
        1: Report({}),
    },
}


@pytest.mark.parametrize("words", WORDS)
def test_a_rank_that_is_behind_is_named_with_its_operation(words: str) -> None:
    cut = next_targets(WORDS[words])
    assert (cut.decision, cut.reason) == (Decision.RUN_ON, words)


def test_the_rank_that_waits_for_nobody_is_named_first() -> None:
    """Rank 0 waits in its operation for rank 2, rank 1 for rank 0: rank 2 is the one to look at."""
    members = {"a": (0, 2), "b": (0, 1), "c": (1, 2)}
    a, b, c = map(Channel, members)
    reports = {
        0: Report({a: 1}, members=members),
        1: Report({b: 1}, members=members),
        2: Report({}, members=members, running=frozenset({MAIN})),
    }
    assert next_targets(reports).reason.startswith("rank 2 has not reached operation 1 of communicator a")
    assert c not in next_targets(reports).targets


def test_a_guess_is_told() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)}
    assert looked_twice(reports).reason.endswith("; nothing moves, so rank 1 is let on by a guess")
