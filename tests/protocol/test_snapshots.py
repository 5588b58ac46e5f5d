"""Every event of taking a snapshot, with every participant dying at it: the job goes on, and from the first snapshot that
counts on there is always a complete one, even if a node is lost."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from migrator.job_protocol import SNAPSHOT, index_of
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, CopyDecision, StoreDecision, StoreFacts
from snapshotd.moves.rules import CopyState, Mark, Outcome
from tests.protocol.job_driver import BUDDIES, RPC, TWO_BUDDIES, RollingBack, Taking
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import DRIVER, NODES, Refused
from tests.protocol.test_jobs import FAULTS
from tests.sampling import Sampler

COPIES = {1: BUDDIES, 2: TWO_BUDDIES}


def walked(*, second: bool, copies: int = 1) -> tuple[JobModel, Taking]:
    """A model with a running job, of which there is a snapshot if this is to be the second one."""
    model = JobModel(bears=copies)
    if second:
        assert Taking(model, "first", COPIES[copies]).run() == "done"
        model.settle()
        assert model.snapshot() == "first"
    model.labels.clear()
    return model, Taking(model, "s", COPIES[copies])


@cache
def labels(*, second: bool, copies: int = 1) -> tuple[str, ...]:
    model, attempt = walked(second=second, copies=copies)
    assert attempt.run() == "done"
    return tuple(model.labels)


def judge(model: JobModel) -> None:
    model.settle()
    assert model.unfinished() == []
    alive = [copy for copy in model.copies if copy.alive]
    assert all(copy.running for copy in alive), "a rank stays frozen"
    assert len(alive) == 2 or model.killed
    complete = {snapshot for snapshot, _ in model.kept.values()}
    assert len(complete) <= 1, f"more than one snapshot is left: {model.kept}"
    if len(alive) == 2 and not model.reboots:
        assert Taking(model, "again", COPIES[model.bears]).run() == "done"
        model.settle()
        assert model.snapshot() == "again"
        assert sorted(model.kept.values()) == [("again", rank) for rank in (0, 1) for _ in range(model.bears + 1)]


@pytest.mark.parametrize("copies", COPIES)
def test_snapshot_without_faults(copies: int) -> None:
    model, attempt = walked(second=True, copies=copies)
    assert attempt.run() == "done"
    model.settle()
    assert model.running() == [(0, "one"), (1, "two")]
    assert model.snapshot() == "s"
    assert {(node, rank) for (node, _), (_, rank) in model.kept.items()} == {
        *(("one", 0), ("two", 1)),
        *((node, rank) for rank in (0, 1) for node in COPIES[copies][rank]),
    }


def test_the_walk_asks_for_every_call_of_the_table() -> None:
    for step in SNAPSHOT:
        if (rpc := RPC[step.call]) and not step.only_with_nccl:
            assert any(label.startswith(f"driver: {rpc}") for label in labels(second=False)), step.call


@pytest.mark.parametrize(
    ("second", "soon", "copies"),
    [(False, False, 1), (False, True, 1), (True, False, 1), (True, True, 1), (True, False, 2)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_any_participant_dies_at_any_event(copies: int, fault: str, second: bool, soon: bool, sampled: Sampler) -> None:
    for event, label in sampled(enumerate(labels(second=second, copies=copies)), 12):
        model, attempt = walked(second=second, copies=copies)
        model.faults[event] = FAULTS[fault]
        if soon:
            model.faults[event + 2] = JobModel.heal
        try:
            attempt.run()
            judge(model)
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {label}")
            raise


@pytest.mark.parametrize("then", ["driver dies", "daemon of one dies"])
@pytest.mark.parametrize("first", ["daemon of one dies", "daemon of two dies", "two reboots"])
def test_two_participants_die(first: str, then: str) -> None:
    count = len(labels(second=True))
    for event in range(count):
        for later in range(event + 1, min(count, event + 4)):
            model, attempt = walked(second=True)
            model.faults[event], model.faults[later] = FAULTS[first], FAULTS[then]
            try:
                attempt.run()
                judge(model)
            except AssertionError as error:
                error.add_note(f"{first} at {event}, {then} at {later}")
                raise


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(NODES, 2)))
def test_two_copies_outlive_the_loss_of_any_two_nodes_at_any_event(first: str, then: str) -> None:
    """The model checks after every event that a complete snapshot is left."""

    def both(model: JobModel) -> None:
        model.reboot(first)
        model.reboot(then)

    count = len(labels(second=True, copies=2))
    for event in range(count):
        for later in (event, event + 2) if first < then else (event + 2,):
            model, attempt = walked(second=True, copies=2)
            if later == event:
                model.faults[event] = both
            else:
                model.faults |= {event: FAULTS[f"{first} reboots"], later: FAULTS[f"{then} reboots"]}
            try:
                attempt.run()
                judge(model)
                assert model.snapshot() in {"first", "s"}, "it is still there when all nodes are back"
            except AssertionError as error:
                error.add_note(f"{first} is lost at {event}, {then} at {later}")
                raise


@pytest.mark.parametrize("declared", [False, True])
def test_job_is_rolled_back_from_the_second_copy_after_a_rank_and_its_first_buddy_were_lost(declared: bool) -> None:
    model = JobModel(bears=2)
    assert Taking(model, "s", (("two", "spare"), ("spare", "one"))).run() == "done"
    model.settle()
    for node in ("two", "spare"):
        model.reboot(node)
        model.declared |= {node} if declared else set()
    found = RollingBack(model, "b", to=("one", "one")).run()
    if not declared:
        assert found != "done", "one of three voters has no majority"
        return
    assert found == "done"
    assert model.running() == [(0, "one"), (1, "one")]
    model.settle()
    assert model.running() == [(0, "one"), (1, "one")]


@pytest.mark.parametrize("copies", COPIES)
def test_driver_that_asks_for_commit_too_early_is_refused(copies: int) -> None:
    before = SNAPSHOT[index_of("Job.Begin", SNAPSHOT) + 1 : index_of("Job.Commit", SNAPSHOT)]
    for reached in range(len(before)):
        model, attempt = walked(second=False, copies=copies)
        for step in SNAPSHOT[: SNAPSHOT.index(before[reached])]:
            attempt.ask(step)
        with pytest.raises(Refused):
            model.call(DRIVER, NODES[0], "job_commit", attempt.name)
        judge(model)


def test_a_rank_goes_on_whatever_becomes_of_its_snapshot() -> None:
    def after(*, outcome: Outcome | None = None, continued: bool = False, copy_exists: bool = True) -> StoreDecision:
        facts = StoreFacts(
            mark=Mark.STREAMED,
            outcome=outcome,
            copy_exists=copy_exists,
            interrupted=False,
            lease_expired=False,
            coordinator=Answer.UNREACHABLE,
            snapshot=True,
            continued=continued,
        )
        return job_rules.store_next(facts)[0]

    assert after() is StoreDecision.CONTINUE
    assert after(outcome=Outcome.COMMIT) is StoreDecision.CONTINUE
    assert after(continued=True) is StoreDecision.WAIT
    assert after(continued=True, copy_exists=False) is StoreDecision.WAIT, "the image counts without the process"
    assert after(continued=True, outcome=Outcome.COMMIT) is StoreDecision.KEEP


def test_a_whole_copy_waits_for_the_coordinator() -> None:
    def decide(mark: Mark, said: Answer) -> CopyDecision:
        return job_rules.copy_next(mark, None, said)[0]

    for said in (Answer.UNREACHABLE, Answer.UNKNOWN, Answer.UNDECIDED):
        assert decide(Mark.SEALED, said) is CopyDecision.WAIT
    assert decide(Mark.SEALED, Answer.COMMIT) is CopyDecision.RECORD_COMMIT
    assert decide(Mark.PREPARED, Answer.UNKNOWN) is CopyDecision.RECORD_ABORT
    assert decide(Mark.PREPARED, Answer.COMMIT) is CopyDecision.WAIT, "the coordinator cannot say that"
    assert job_rules.copy_state(Mark.SEALED, whole=True) is CopyState.STORED
    assert job_rules.copy_state(Mark.SEALED, whole=False) is CopyState.RECEIVING, "a reboot has emptied the memory"
