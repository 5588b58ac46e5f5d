"""Every event of a rollback after a node was lost, with every participant dying at it: one incarnation runs, the snapshot is
never lost, and a retry brings the job back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Ended, JobDecision
from tests.protocol.job_driver import Attempt, RollingBack, Taking
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import DRIVER, NODES, Refused
from tests.protocol.test_jobs import FAULTS
from tests.sampling import Sampler

LOSSES: dict[str, Callable[[JobModel], None]] = {
    "two has no power": lambda model: model.reboot("two"),
    "two is cut off": lambda model: model.cut.add("two"),
    "rank 1 has died": lambda model: _kill(model, 1),
}


def _kill(model: JobModel, rank: int) -> None:
    for copy in model.copies:
        if copy.rank == rank:
            copy.alive = copy.running = False
    model.killed = True


def walked(loss: str, *, twice: bool = False) -> tuple[JobModel, RollingBack]:
    """A job that has a snapshot, and has then lost rank 1 or its node. `twice`: it was rolled back before."""
    model = JobModel()
    assert Taking(model, "s").run() == "done"
    model.settle()
    if twice:
        assert RollingBack(model, "before").run() == "done"
        model.settle()
    LOSSES[loss](model)
    model.labels.clear()
    return model, RollingBack(model, "b")


@cache
def labels(loss: str) -> tuple[str, ...]:
    model, attempt = walked(loss)
    assert attempt.run() == "done"
    return tuple(model.labels)


def judge(model: JobModel) -> None:
    """Whatever happened, a retry brings the job back, unless two nodes have lost what was in their memory."""
    model.settle(rounds=5)
    assert model.unfinished() == []
    if model.running() == [(0, "one"), (1, "spare")]:
        return
    if not model.snapshot():
        assert model.reboots > 1
        return
    retry = RollingBack(model, "again")
    assert retry.run() == "done"
    model.settle()
    assert model.running() == [(0, "one"), (1, "spare")]
    (incarnation,) = {copy.incarnation for copy in model.copies if copy.alive}
    assert incarnation.startswith("again-resume")


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_job_is_rolled_back_onto_a_spare(loss: str, twice: bool) -> None:
    model, attempt = walked(loss, twice=twice)
    assert attempt.run() == "done"
    assert model.running() == [(0, "one"), (1, "spare")]
    model.settle()
    assert model.running() == [(0, "one"), (1, "spare")], "what was lost does not run when it is back"
    assert model.snapshot() == "s", "the job is still protected"
    assert model.unfinished() == []


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_participant_dies_at_any_event(loss: str, fault: str, soon: bool, sampled: Sampler) -> None:
    for event, label in sampled(enumerate(labels(loss)), 12):
        model, attempt = walked(loss)
        model.faults[event] = FAULTS[fault]
        if soon:
            model.faults[event + 2] = JobModel.heal
        try:
            attempt.run()
            judge(model)
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {label}")
            raise


#: The images that are of no use, of the snapshot of `walked`.
BAD = {"rank 0": ["one s-0"], "rank 1": ["two s-1"], "both": ["one s-0", "two s-1"]}


def walked_to_copies(bad: str, call: str) -> tuple[JobModel, RollingBack]:
    """Rank 1 has died, and images cannot be read, as `call` notices, or not be sent ("link"). The copies can."""
    model, attempt = walked("rank 1 has died")
    for place in BAD[bad]:
        node, image = place.split()
        assert (node, image) in model.kept
        if call == "link":
            model.stuck.add((node, image))
        else:
            model.unreadable[node, image] = call
    return model, attempt


@pytest.mark.parametrize("call", ["send", "restore", "link"])
@pytest.mark.parametrize("bad", BAD)
def test_job_is_rolled_back_from_copies_if_images_are_of_no_use(bad: str, call: str) -> None:
    model, attempt = walked_to_copies(bad, call)
    assert attempt.run() == "done"
    assert model.running() == [(0, "one"), (1, "spare")]
    model.settle()
    assert model.snapshot() == "s", "the job is still protected"
    assert model.unfinished() == []


def test_job_without_a_readable_image_stays_suspended_until_there_is_one() -> None:
    model, attempt = walked_to_copies("rank 0", "send")
    (copy,) = [place for place, (_, rank) in model.kept.items() if rank == 0 and place[0] == "two"]
    model.unreadable[copy] = "send"
    assert attempt.run() == "no image"
    model.settle()
    assert model.running() == []
    assert model.snapshot() == "s", "no image is dropped because it could not be read"
    assert RollingBack(model, "again").run() == "no image"
    model.settle()
    del model.unreadable[copy]
    assert RollingBack(model, "mended").run() == "done"
    assert model.running() == [(0, "one"), (1, "spare")]


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", ["send", "restore", "link"])
def test_any_participant_dies_while_copies_replace_images_of_no_use(
    call: str, fault: str, soon: bool, sampled: Sampler
) -> None:
    model, attempt = walked_to_copies("both", call)
    assert attempt.run() == "done"
    for event, label in sampled(enumerate(model.labels), 12):
        model, attempt = walked_to_copies("both", call)
        model.faults[event] = FAULTS[fault]
        if soon:
            model.faults[event + 2] = JobModel.heal
        try:
            attempt.run()
            bad = {*model.unreadable, *model.stuck}
            kept = {rank for place, (name, rank) in model.kept.items() if name == "s" and place not in bad}
            if kept != {0, 1}:
                model.unreadable.clear()  # a copy was lost with its node
                model.stuck.clear()
            judge(model)
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {label}")
            raise


#: What happens while a snapshot is taken, after which the job is rolled back at once.
MEANWHILE: dict[str, Callable[[JobModel], None]] = {
    **FAULTS,
    "rank 1 moves": lambda model: model.move(1, "spare"),
}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("fault", MEANWHILE)
def test_job_is_rolled_back_at_any_event_of_a_snapshot(fault: str, second: bool) -> None:
    """Some nodes may not know yet that the snapshot counts: their ranks are not bound to its coordinator."""
    count = len(snapshot_labels())
    for event in range(count):
        model = JobModel()
        if second:
            assert Taking(model, "before").run() == "done"
            model.settle()
            model.labels.clear()
        model.faults[event] = MEANWHILE[fault]
        try:
            Taking(model, "s").run()
            model.faults.clear()
            RollingBack(model, "early").run()
            model.pass_time()
            model.settle(rounds=6)
            assert model.unfinished() == []
            if model.snapshot() and model.running() != [(0, "one"), (1, "spare")]:
                assert RollingBack(model, "again").run() == "done"
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {model.labels[event]}")
            raise


@cache
def snapshot_labels() -> tuple[str, ...]:
    model = JobModel()
    assert Taking(model, "s").run() == "done"
    return tuple(model.labels)


def test_no_snapshot_is_taken_of_an_incarnation_that_is_over() -> None:
    model, _ = walked("rank 1 has died")
    for copy in model.copies:
        copy.alive = copy.running = True
    model.call(DRIVER, NODES[0], "job_rollback", "r", "s")  # and no node was asked to end its ranks yet
    assert Taking(model, "late").run() == "undone"
    assert Attempt(model, "suspended").run() == "undone"
    model.settle()
    assert model.snapshot() == "s"
    assert RollingBack(model, "b").run() == "done"


def test_a_suspended_job_is_not_rolled_back() -> None:
    model = JobModel()
    assert Taking(model, "s").run() == "done"
    model.settle()
    assert Attempt(model, "x").run() == "done"
    assert RollingBack(model, "b").run() == "refused"
    assert Attempt(model, "back", "x").run() == "done"
    assert RollingBack(model, "b").run() == "refused", "it is another incarnation now"
    assert Taking(model, "newer").run() == "done"
    model.settle()
    assert RollingBack(model, "b").run() == "done"


def test_a_job_is_not_resumed_while_its_former_incarnation_may_run() -> None:
    model, _ = walked("two is cut off")
    model.call(DRIVER, NODES[0], "job_rollback", "r", "s")
    model.settle_rollback(NODES[0], "r")
    assert not model.journal[NODES[0], "r"].ended, "node two is only silent yet, and its rank runs"
    assert [copy.running for copy in model.copies if copy.node == "two"] == [True]
    with pytest.raises(Refused):
        model.call(DRIVER, NODES[0], "job_begin", "early", "r", "one x one y")
    model.pass_time()
    assert [copy.running for copy in model.copies if copy.node == "two"] == [False]
    model.settle_rollback(NODES[0], "r")
    assert model.journal[NODES[0], "r"].ended


def test_a_node_whose_daemon_is_down_is_waited_for() -> None:
    model, attempt = walked("rank 1 has died")
    model.kill("spare")
    assert attempt.run() == "waits"
    model.declared.add("spare")
    model.settle_rollback(NODES[0], "b-rollback")
    assert Attempt(model, "r", "b-rollback", to=("one", "two")).run() == "done"


def test_rules_of_ending_an_incarnation() -> None:
    over = {"a": Ended.ENDED, "b": Ended.CUT_OFF}
    assert job_rules.rollback_next(over)[0] is JobDecision.CLOSE
    for other in set(Ended) - job_rules.OVER:
        assert job_rules.rollback_next({**over, "c": other})[0] is JobDecision.ASK
    assert job_rules.silent_node(job_rules.CUT_OFF_S) is Ended.SILENT, "a node may still be at ending its ranks"
    assert job_rules.silent_node(job_rules.FENCED_S) is Ended.CUT_OFF
    assert job_rules.is_cut_off(job_rules.CUT_OFF_S)
