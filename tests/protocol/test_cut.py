"""Tests the cut with random programs: it is always found, consistent, the least without guesses, and deterministic."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.quiesce.cut import Decision, Why
from tests.protocol.test_cut_job import Hints, Job, held_there, judge, starts
from tests.protocol.test_cut_programs import SEEDS, Kind, pipeline
from tests.sampling import DRAWN, examples

KINDS = pytest.mark.parametrize("kind", Kind)
BLOCKING = pytest.mark.parametrize("blocking", [False, True], ids=["launches return", "launches block"])


@KINDS
@BLOCKING
@settings(DRAWN, max_examples=examples(60))
@given(program=SEEDS, seed=SEEDS, hints=st.sampled_from(Hints), members_known=st.booleans())
def test_every_job_reaches_a_consistent_cut_and_continues_from_it(
    kind: Kind, blocking: bool, program: int, seed: int, hints: Hints, members_known: bool
) -> None:
    """This holds for any hints, and whether or not the members of a new communicator are known at once."""
    job = starts(kind, Random(program), seed, blocking=blocking, hints=hints)
    job.members_known = members_known
    held_there(job)


@BLOCKING
@pytest.mark.parametrize(("kind", "hints"), [(Kind.ALONE, Hints.PAST), (Kind.OWN, Hints.FULL)])
@settings(DRAWN, max_examples=examples(100))
@given(program=SEEDS, seed=SEEDS)
def test_cut_is_least_without_guesses_if_each_communicator_has_one_thread(
    kind: Kind, hints: Hints, blocking: bool, program: int, seed: int
) -> None:
    job = starts(kind, Random(program), seed, blocking=blocking, hints=hints)
    least = job.program.least(job.at)
    cut = job.hold()
    judge(job, cut)
    assert not cut.guesses
    assert job.at == least


@BLOCKING
@settings(DRAWN, max_examples=examples(100))
@given(program=SEEDS, seed=SEEDS)
def test_cut_is_least_if_threads_take_turns(blocking: bool, program: int, seed: int) -> None:
    job = starts(Kind.HANDOVER, Random(program), seed, blocking=blocking, hints=Hints.PAST)
    least = job.program.least(job.at)
    assert held_there(job) == least


@BLOCKING
@settings(DRAWN, max_examples=examples(100))
@given(program=SEEDS, seed=SEEDS)
def test_cut_without_a_guess_is_least_for_any_use_of_threads(blocking: bool, program: int, seed: int) -> None:
    job = starts(Kind.WILD, Random(program), seed, blocking=blocking)
    least = job.program.least(job.at)
    cut = job.hold()
    judge(job, cut)
    assert all(job.at[thread] >= position for thread, position in least.items())
    if not cut.guesses:
        assert job.at == least


@KINDS
@BLOCKING
@settings(DRAWN, max_examples=examples(60))
@given(program=SEEDS, seed=SEEDS, futures=st.lists(SEEDS, min_size=3, max_size=3))
def test_same_start_ends_at_the_same_cut(
    kind: Kind, blocking: bool, program: int, seed: int, futures: list[int]
) -> None:
    """With guesses this holds only if a rank's threads take turns."""
    job = starts(kind, Random(program), seed, blocking=blocking)
    twins = [job.twin(future) for future in futures]
    cuts = [twin.hold() for twin in twins]
    for twin, cut in zip(twins, cuts, strict=True):
        judge(twin, cut)
    if kind is not Kind.WILD or not any(cut.guesses for cut in cuts):
        assert all(twin.at == twins[0].at for twin in twins)


@KINDS
@settings(DRAWN, max_examples=examples(40))
@given(program=SEEDS, seed=SEEDS, blocking=st.booleans())
def test_job_can_be_stopped_repeatedly(kind: Kind, program: int, seed: int, blocking: bool) -> None:
    job = starts(kind, Random(program), seed, blocking=blocking)
    for _ in range(4):
        judge(job, job.hold())
        job.open()
        job.run(30)
        job.close()
    held_there(job)


@KINDS
@settings(DRAWN, max_examples=examples(60))
@given(program=SEEDS, seed=SEEDS, blocking=st.booleans())
def test_rank_stuck_in_user_code_is_named_and_the_job_continues(
    kind: Kind, program: int, seed: int, blocking: bool
) -> None:
    job = starts(kind, Random(program), seed, blocking=blocking)
    job.stuck = set([thread for thread in job.program.threads if job.working(thread)][:1])
    cut = job.hold()
    if cut.decision is Decision.RUN_ON:
        assert {rank for rank, _ in job.stuck} <= {late.rank for late in cut.behind if late.why is Why.USER_CODE}
    if cut.decision is not Decision.RUN_ON or not job.stuck:
        judge(job, cut)
    job.open()
    job.stuck = set()
    job.finish()


@BLOCKING
@settings(DRAWN, max_examples=examples(60))
@given(seed=SEEDS, most=st.integers(0, 600))
def test_pipeline_stops_at_the_least_cut(blocking: bool, seed: int, most: int) -> None:
    job = Job(pipeline(), Random(seed), blocking, Hints.PAST)
    job.run(most)
    job.close()
    least = job.program.least(job.at)
    assert held_there(job) == least
