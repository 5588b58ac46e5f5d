"""Every event of suspending and resuming a job, with every participant dying at it: one incarnation runs, or none and all
its images are whole. Afterwards everything is settled, and a retry succeeds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product

import pytest

from migrator.job_protocol import RESUME, SUSPEND, index_of
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, JobDecision, Part, StoreDecision, StoreFacts
from snapshotd.moves.rules import CopyState, Mark, Outcome
from tests.protocol.job_driver import RPC, Attempt
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import DRIVER, NODES, Refused
from tests.sampling import Sampler


def walked(*, resuming: bool) -> tuple[JobModel, Attempt]:
    """A model with a running or a suspended job, and an attempt that was not run yet."""
    model = JobModel()
    if resuming:
        assert Attempt(model, "s").run() == "done"
        model.settle()
        assert model.running() == []
    model.labels.clear()
    return model, Attempt(model, "r", "s") if resuming else Attempt(model, "s")


@cache
def labels(*, resuming: bool) -> tuple[str, ...]:
    model, attempt = walked(resuming=resuming)
    assert attempt.run() == "done"
    return tuple(model.labels)


def suspended(model: JobModel) -> bool:
    return set(model.images.values()) == {0, 1} and not any(copy.alive for copy in model.copies)


def judge(model: JobModel, *, resuming: bool) -> None:
    """The job runs or is suspended, nothing is left over, and a retry succeeds."""
    model.settle()
    assert model.unfinished() == []
    if model.killed and not suspended(model):
        # A rank has died, as it does without us: after it ran, or with its node before the job was suspended.
        committed = [r for r in model.journal.values() if r.role == "job" and r.outcome is Outcome.COMMIT]
        if committed and (last := committed[-1]).suspension:
            ran = [model.journal[node, move].mark is Mark.ACTIVATED for node, move, _, _ in last.parts]
            assert all(ran), "a copy died before it ran, and the images are gone"
        return
    runs = [rank for rank, _ in model.running()] == [0, 1]
    assert runs != suspended(model), f"{model.copies} {model.images}"
    assert bool(model.images) == suspended(model), "images are left"
    if runs and resuming:
        return  # it was resumed
    if runs:
        assert Attempt(model, "again").run() == "done"
    name = next(
        move
        for (_, move), record in model.journal.items()
        if record.role == "job" and not record.suspension and record.outcome is Outcome.COMMIT
    )
    model.settle()
    assert suspended(model)
    assert Attempt(model, "back", name).run() == "done"
    model.settle()
    assert model.running() == [(0, "one"), (1, "spare")]
    assert model.images == {}


def cut_off(model: JobModel, node: str) -> None:
    model.cut.add(node)


FAULTS: dict[str, Callable[[JobModel], None]] = {
    "driver dies": lambda model: model.kill(DRIVER),
    **{f"daemon of {node} dies": partial(JobModel.kill, who=node) for node in NODES},
    **{f"{node} reboots": partial(JobModel.reboot, node=node) for node in NODES},
    **{f"{node} is cut off": partial(cut_off, node=node) for node in NODES},
}


def test_suspend_and_resume_without_faults() -> None:
    model, attempt = walked(resuming=True)
    assert suspended(model)
    assert attempt.run() == "done"
    assert model.running() == [(0, "one"), (1, "spare")]
    model.settle()
    assert (model.images, model.unfinished()) == ({}, [])


@pytest.mark.parametrize("resuming", [False, True])
def test_the_walk_asks_for_every_call_of_the_table(resuming: bool) -> None:
    for step in RESUME if resuming else SUSPEND:
        if (rpc := RPC[step.call]) and not step.only_with_nccl:
            assert any(label.startswith(f"driver: {rpc} asked") for label in labels(resuming=resuming)), step.call


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("soon", [False, True])
def test_any_participant_dies_at_any_event(fault: str, resuming: bool, soon: bool) -> None:
    """What died comes back at the next event but one, or only when the driver has given up."""
    for event, label in enumerate(labels(resuming=resuming)):
        model, attempt = walked(resuming=resuming)
        model.faults[event] = FAULTS[fault]
        if soon:
            model.faults[event + 2] = JobModel.heal
        try:
            attempt.run()
            judge(model, resuming=resuming)
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {label}")
            raise


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("second", ["driver dies", "daemon of one dies", "daemon of two dies", "daemon of spare dies"])
@pytest.mark.parametrize("first", ["daemon of one dies", "daemon of two dies", "daemon of spare dies"])
def test_two_participants_die(first: str, second: str, resuming: bool, sampled: Sampler) -> None:
    count = len(labels(resuming=resuming))
    pairs = [(event, later) for event in range(count) for later in range(event + 1, min(count, event + 8))]
    for event, later in sampled(pairs, 40):
        model, attempt = walked(resuming=resuming)
        model.faults[event], model.faults[later] = FAULTS[first], FAULTS[second]
        try:
            attempt.run()
            judge(model, resuming=resuming)
        except AssertionError as error:
            error.add_note(f"{first} at {event}, {second} at {later}")
            raise


@pytest.mark.parametrize("resuming", [False, True])
def test_driver_that_asks_for_commit_too_early_is_refused(resuming: bool) -> None:
    """After any call, also one that only the first of the two nodes has got."""
    table = RESUME if resuming else SUSPEND
    asked = table[index_of("Job.Begin", table) + 1 : index_of("Job.Commit", table)]
    before = [step for step in asked if RPC[step.call] and not step.only_with_nccl]
    for reached, ranks in product(range(len(before)), ((), (0,))):
        model, attempt = walked(resuming=resuming)
        for step in table[: table.index(before[reached])]:
            attempt.ask(step)
        for rank in ranks:
            model.call(DRIVER, *attempt.request(RPC[before[reached].call], rank))
        with pytest.raises(Refused):
            model.call(DRIVER, NODES[0], "job_commit", attempt.name)
        judge(model, resuming=resuming)


@pytest.mark.parametrize("node", NODES)
def test_a_suspended_job_survives_the_reboot_of_any_node(node: str) -> None:
    model, _ = walked(resuming=True)
    model.reboot(node)
    model.start(node)
    assert Attempt(model, "r", "s").run() == "done"
    assert model.running() == [(0, "one"), (1, "spare")]


def test_a_job_is_resumed_once() -> None:
    model, attempt = walked(resuming=True)
    assert attempt.run() == "done"
    with pytest.raises(Refused):
        model.call(DRIVER, NODES[0], "job_begin", "second", "s", "one x one y")


# ---------------------------------------------------------------- the rules themselves: each matters


def store(mark: Mark, said: Answer, **more: bool) -> StoreDecision:
    facts = {"copy_exists": True, "interrupted": False, "lease_expired": False, **more}
    return job_rules.store_next(StoreFacts(mark=mark, outcome=None, coordinator=said, **facts))[0]


@pytest.mark.parametrize("said", [Answer.UNREACHABLE, Answer.UNDECIDED, Answer.UNKNOWN])
@pytest.mark.parametrize("trouble", ["interrupted", "lease_expired"])
def test_a_whole_image_waits_for_the_coordinator(said: Answer, trouble: str) -> None:
    assert store(Mark.STREAMED, said, **{trouble: True}) is StoreDecision.WAIT


def test_a_store_without_a_whole_image_may_abort_alone() -> None:
    assert store(Mark.FROZEN, Answer.UNDECIDED, interrupted=True) is StoreDecision.RECORD_ABORT
    assert store(Mark.FROZEN, Answer.UNDECIDED, copy_exists=False) is StoreDecision.RECORD_ABORT
    assert store(Mark.FROZEN, Answer.UNREACHABLE, lease_expired=True) is StoreDecision.RECORD_ABORT
    assert store(Mark.FROZEN, Answer.UNREACHABLE) is StoreDecision.WAIT


def test_commit_needs_every_participant() -> None:
    assert job_rules.may_commit({"rank 0": Part.READY, "rank 1": Part.READY})[0]
    assert not job_rules.may_commit({})[0]
    for other in set(Part) - {Part.READY}:
        ready, why = job_rules.may_commit({"rank 0": Part.READY, "rank 1": other})
        assert not ready
        assert why == f"rank 1 {other}"


def test_a_store_whose_frozen_rank_died_is_not_ready() -> None:
    assert job_rules.store_answer(Mark.STREAMED, None, copy_exists=False) is Part.LOST
    assert job_rules.store_answer(Mark.STREAMED, None, copy_exists=True) is Part.READY
    assert job_rules.target_part(CopyState.GONE) is Part.LOST


def test_the_coordinator_decides_alone_only_by_its_lease() -> None:
    assert job_rules.job_next(Mark.BEGUN, None, (), lease_expired=False)[0] is JobDecision.WAIT
    assert job_rules.job_next(Mark.BEGUN, None, (), lease_expired=True)[0] is JobDecision.RECORD_ABORT
    absent = (Part.DONE, Part.ABSENT)
    assert job_rules.job_next(Mark.BEGUN, Outcome.ABORT, absent, lease_expired=True)[0] is JobDecision.CLOSE
    assert job_rules.job_next(Mark.BEGUN, Outcome.COMMIT, absent, lease_expired=True)[0] is JobDecision.ASK


@pytest.mark.parametrize("lost", [Part.LOST, Part.DROPPED])
def test_a_resumption_of_which_a_copy_died_before_it_ran_is_taken_back(lost: Part) -> None:
    def after(outcome: Outcome, *parts: Part, resumes: bool = True) -> JobDecision:
        return job_rules.job_next(Mark.BEGUN, outcome, parts, lease_expired=True, resumes=resumes)[0]

    assert after(Outcome.COMMIT, Part.RUNS, lost) is JobDecision.TAKE_BACK
    assert after(Outcome.COMMIT, Part.READY, lost, resumes=False) is JobDecision.ASK, (
        "the image of a suspension is whole"
    )
    assert after(Outcome.ABORT, Part.RUNS, Part.DROPPED) is JobDecision.END
    assert after(Outcome.ABORT, Part.DONE, Part.DROPPED) is JobDecision.CLOSE
    assert after(Outcome.COMMIT, Part.RUNS, Part.DONE) is JobDecision.CLOSE, (
        "a copy that ran and ended is the job's own end"
    )
