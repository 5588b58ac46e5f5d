"""Tests each rule of the cut in small, readable jobs, and the reasons that are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from migrator.quiesce.cut import (
    GROWTH,
    MOST_GROUPS,
    Channel,
    Counts,
    Cut,
    Decision,
    Report,
    is_permitted,
    may_launch,
    next_targets,
)

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
    """A rank of a job of two ranks. Its threads `users` have used every communicator."""
    return Report(launched, held or {}, PAIR, dict.fromkeys(PAIR, users), running, ended)


def looked_twice(reports: dict[int, Report]) -> Cut:
    return next_targets(reports, next_targets(reports))


def test_job_that_has_launched_nothing_is_at_its_cut() -> None:
    assert next_targets({0: rank({}, {MAIN: {TP: 1}}), 1: rank({})}).decision is Decision.REACHED


def test_closed_gate_without_targets_lets_nothing_pass() -> None:
    assert not may_launch({}, {}, {TP: 1})
    assert not may_launch({TP: 7}, {TP: 7}, {TP: 1})


def test_whole_group_passes_if_another_rank_has_launched_one_of_its_operations() -> None:
    assert may_launch({TP: 6, DP: 3}, {TP: 7, DP: 3}, {TP: 1, DP: 2})


def test_other_operations_of_a_launched_group_become_targets() -> None:
    cut = next_targets({0: rank({TP: 7, DP: 5}), 1: rank({TP: 7, DP: 3})})
    assert cut.targets == {TP: 7, DP: 5}
    assert [(late.rank, late.channel, late.target) for late in cut.behind] == [(1, DP, 5)]


def test_equal_counts_are_the_cut_even_if_threads_run() -> None:
    """A thread in user code will wait when it reaches the gate, because no channel is below its target."""
    cut = next_targets({0: rank({TP: 7}, {MAIN: {DP: 1}}), 1: rank({TP: 7}, running=frozenset({MAIN}))})
    assert (cut.decision, cut.behind) == (Decision.REACHED, ())
    assert cut.reason == "every rank has launched the same operations"


def test_only_candidate_waiting_with_another_group_passes_for_certain() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}})})
    assert cut.targets == {TP: 7, DP: 1}
    assert not cut.guesses


def test_threads_of_a_rank_that_is_not_behind_do_not_pass() -> None:
    cut = next_targets({0: rank({TP: 7}, {MAIN: {DP: 1}}), 1: rank({TP: 6}, running=frozenset({MAIN}))})
    assert cut.targets == {TP: 7}


def test_running_thread_is_waited_for_although_another_waits_at_the_gate() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH, running=frozenset({MAIN}))}
    assert looked_twice(reports).targets == {TP: 7}


def test_waiting_thread_passes_once_the_running_thread_counts_as_idle() -> None:
    late = rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH, running=frozenset({MAIN}))
    cut = looked_twice({0: rank({TP: 7}), 1: replace(late, running=frozenset())})
    assert cut.targets == {TP: 7, DP: 1}
    assert set(cut.guesses) == {1}


def test_guess_is_made_only_in_the_second_equal_round() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)}
    first = next_targets(reports)
    assert first.targets == {TP: 7}
    assert next_targets(reports, first).targets == {TP: 7, DP: 1}


def test_running_rank_that_is_not_behind_does_not_prevent_a_guess() -> None:
    held = rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)
    first = next_targets({0: rank({TP: 7}, running=frozenset({MAIN})), 1: held})
    assert next_targets({0: rank({TP: 7}, {MAIN: {TP: 1}}), 1: held}, first).targets == {TP: 7, DP: 1}


def test_launch_between_two_rounds_delays_the_guess() -> None:
    """Rank 1's idle thread waited for rank 0's operation and may be running by now."""
    held = rank({TP: 6, PP: 1}, {AUTOGRAD: {DP: 1}}, users=BOTH)
    first = next_targets({0: rank({TP: 7}), 1: held})
    second = next_targets({0: rank({TP: 7, PP: 1}), 1: held}, first)
    assert second.targets == {TP: 7, PP: 1}
    assert next_targets({0: rank({TP: 7, PP: 1}), 1: held}, second).targets == {TP: 7, PP: 1, DP: 1}


def test_only_waiting_threads_that_have_used_the_communicator_pass() -> None:
    groups: dict[int, Counts] = {MAIN: {DP: 1}, AUTOGRAD: {PP: 1}, OTHER: {SEND: 1}}
    certain = {0: rank({TP: 7}), 1: rank({TP: 6}, groups)}
    assert next_targets(certain).targets == {TP: 7, DP: 1}
    guess = {0: rank({TP: 7}), 1: rank({TP: 6}, groups, users=BOTH)}
    assert looked_twice(guess).targets == {TP: 7, DP: 1, PP: 1}


def test_thread_waiting_with_the_missing_operation_keeps_others_from_passing() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}, AUTOGRAD: {TP: 1}})})
    assert cut.targets == {TP: 7}


def test_thread_allowed_to_pass_has_to_launch_before_the_cut_is_reached() -> None:
    """Rank 1's two threads pass by a guess. The first has launched what was missing, the second is still passing the gate."""
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}, AUTOGRAD: {PP: 1}}, users=BOTH)}
    cut = looked_twice(reports)
    even = {TP: 7, DP: 1}
    cut = next_targets({0: rank(even), 1: rank(even, {AUTOGRAD: {PP: 1}}, users=BOTH)}, cut)
    assert cut.decision is Decision.RUN_ON
    assert {(late.rank, late.channel) for late in cut.behind} == {(0, PP), (1, PP)}
    even = {TP: 7, DP: 1, PP: 1}
    assert next_targets({0: rank(even), 1: rank(even)}, cut).decision is Decision.REACHED


def test_member_that_has_not_created_the_communicator_is_behind() -> None:
    creator = Report({TP: 1}, members={"tp0": (0, 2)})
    cut = next_targets({0: creator, 1: Report({}), 2: Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)})})
    assert [late.rank for late in cut.behind] == [2]
    assert cut.targets == {TP: 1, DP: 1}


def test_any_rank_may_be_an_unknown_member() -> None:
    creator = Report({TP: 1}, members={"tp0": (0, None)})
    reports = {0: creator, 1: Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)}), 2: Report({}, members={"dp0": (1, 2)})}
    assert looked_twice(reports).targets == {TP: 1, DP: 1}
    reports[2] = Report({TP: 1}, members={"tp0": (None, 2), "dp0": (1, 2)})
    assert next_targets(reports).decision is Decision.REACHED


def test_member_without_a_report_is_waited_for() -> None:
    """A rank whose report is missing."""
    cut = looked_twice({0: Report({TP: 1}, {MAIN: {DP: 1}}, members={"tp0": (0, None)})})
    assert (cut.decision, cut.targets) == (Decision.RUN_ON, {TP: 1})
    assert cut.reason.startswith("an unknown rank has not reached operation 1 of communicator tp0")


def test_unknown_members_are_guessed_last() -> None:
    creator = Report({TP: 1, PP: 1}, members={"tp0": (0, None), "pp0": (0, 2)})
    bystander = Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)})
    member = Report({}, {MAIN: {DP: 1}, OTHER: {Channel("ep0"): 1}}, {"ep0": (2, 3)}, {"pp0": frozenset({MAIN, OTHER})})
    third = Report({}, members={"ep0": (2, 3)})
    cut = looked_twice({0: creator, 1: bystander, 2: member, 3: third})
    assert set(cut.guesses) == {2}


def test_rank_that_ended_while_behind_ends_the_attempt() -> None:
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, ended=True)})
    assert cut.decision is Decision.NEVER
    assert cut.reason == "rank 1 has not reached operation 7 of communicator tp0: it has ended"


def test_rank_that_ended_after_launching_everything_does_not_prevent_the_cut() -> None:
    assert next_targets({0: rank({TP: 7}), 1: rank({TP: 7}, ended=True)}).decision is Decision.REACHED


REASONS = {
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


@pytest.mark.parametrize("reason", REASONS)
def test_reason_names_the_rank_that_is_behind_and_its_operation(reason: str) -> None:
    cut = next_targets(REASONS[reason])
    assert (cut.decision, cut.reason) == (Decision.RUN_ON, reason)


def test_rank_that_waits_for_no_other_rank_is_named_first() -> None:
    """Rank 0 waits in its operation for rank 2, and rank 1 for rank 0, so rank 2 is the cause."""
    members = {"a": (0, 2), "b": (0, 1), "c": (1, 2)}
    a, b, c = map(Channel, members)
    reports = {
        0: Report({a: 1}, members=members),
        1: Report({b: 1}, members=members),
        2: Report({}, members=members, running=frozenset({MAIN})),
    }
    assert next_targets(reports).reason.startswith("rank 2 has not reached operation 1 of communicator a")
    assert c not in next_targets(reports).targets


def test_reason_mentions_a_guess() -> None:
    reports = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)}
    assert looked_twice(reports).reason.endswith("; nothing moves, so rank 1 is let on by a guess")


def test_only_candidate_may_launch_everything_before_the_missing_operation() -> None:
    """Otherwise a rank that is a hundred groups behind would need a hundred rounds."""
    cut = next_targets({0: rank({TP: 7}), 1: rank({TP: 2}, {MAIN: {DP: 1}})})
    (permission,) = cut.permissions[1]
    assert permission[:3] == (MAIN, TP, 7)
    assert is_permitted(rank({TP: 6, DP: 50}), MAIN, [permission])
    assert not is_permitted(rank({TP: 7}), MAIN, [permission])
    assert not is_permitted(rank({TP: 6}), AUTOGRAD, [permission])


def test_permission_ends_with_its_reason() -> None:
    first = next_targets({0: rank({TP: 7}), 1: rank({TP: 6}, {MAIN: {DP: 1}})})
    second = next_targets({0: rank({TP: 7}), 1: rank({TP: 6, DP: 1}, running=frozenset({MAIN}))}, first)
    assert second.permissions == first.permissions
    third = next_targets({0: rank({TP: 7}), 1: rank({TP: 7, DP: 1})}, second)
    assert not third.permissions


def test_each_guess_about_a_rank_allows_more_groups() -> None:
    def late(launched: int) -> dict[int, Report]:
        held = rank({TP: 6, DP: launched}, {AUTOGRAD: {DP: 1}}, users=BOTH)
        return {0: rank({TP: 7, DP: launched}), 1: replace(held, passed=launched)}

    cut, allowed = next_targets(late(0)), []
    for launched in range(4):
        cut = next_targets(late(launched), next_targets(late(launched), cut))
        allowed.append([one.passed - launched for one in cut.permissions.get(1, ())])
    assert allowed == [[], [GROWTH], [GROWTH**2], [GROWTH**3]]


def test_guesses_have_a_limit_and_those_about_unknown_members_do_not_count() -> None:
    """A number that no message can carry would end the driver while the gates are closed."""
    late = {0: rank({TP: 7}), 1: rank({TP: 6}, {AUTOGRAD: {DP: 1}}, users=BOTH)}
    often = replace(next_targets(late), guesses={1: 40})
    (permission,) = next_targets(late, often).permissions[1]
    assert permission.passed == MOST_GROUPS
    stranger = Report({}, {MAIN: {DP: 1}}, {"dp0": (1, 2)})
    unknown = {0: Report({TP: 1}, members={"tp0": (0, None)}), 1: stranger}
    assert looked_twice(unknown).guesses == {1: 0}
