"""Walks rollbacks after the loss of a coordinator that no operator has declared dead. Every participant dies at every event,
also the coordinator when it comes back, and its successor. One incarnation runs, and a retry brings the job back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest

from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Former, JobDecision
from tests.protocol.job_driver import Protecting, RollingBack, Taking
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import Died, Lost, Refused
from tests.protocol.test_jobs import FAULTS
from tests.sampling import Sampler

#: The buddies of each rank. There are three voters, so two of them are a majority without the coordinator: all keep images,
#: or the spare keeps none and is a witness.
VOTERS = {"three keep images": (("two",), ("spare",)), "one is a witness": (("two",), ("one",))}
BUDDIES, WITH_WITNESS = VOTERS.values()

LOSSES: dict[str, Callable[[JobModel], None]] = {
    "one has no power": lambda model: model.reboot("one"),
    "one is cut off": lambda model: model.cut.add("one"),
}


def walked(loss: str, voters: str, *, twice: bool = False) -> tuple[JobModel, Protecting]:
    """A job that has a snapshot, and has then lost its coordinator. `twice`: it was rolled back before."""
    model = JobModel()
    assert Taking(model, "s", VOTERS[voters]).run() == "done"
    model.settle()
    if twice:
        assert RollingBack(model, "before", to=("one", "two")).run() == "done"
        model.settle()
    LOSSES[loss](model)
    model.labels.clear()
    return model, Protecting(model, "p")


@cache
def labels(loss: str, voters: str) -> tuple[str, ...]:
    model, attempt = walked(loss, voters)
    assert attempt.run() == "done"
    return tuple(model.labels)


def judge(model: JobModel) -> None:
    """Whatever happened, a retry brings the job back, unless two nodes have lost what was in their memory."""
    model.settle(rounds=8)
    assert model.unfinished() == []
    leaders = [node for node in ("one", "two", "spare") if model.led(node) and node not in model.lapsed]
    assert len(leaders) <= 1, f"two coordinators: {leaders}"
    if [rank for rank, _ in model.running()] == [0, 1]:
        return
    if not model.snapshot():
        assert model.reboots > 1
        return
    assert Protecting(model, "again").run() == "done", f"{leaders}"
    model.settle()
    assert [rank for rank, _ in model.running()] == [0, 1]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("voters", VOTERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_another_node_takes_over(loss: str, voters: str, twice: bool) -> None:
    model, attempt = walked(loss, voters, twice=twice)
    assert model.journal["one", "s"].voters == ("one", "spare", "two")
    assert (voters == "one is a witness") == ("spare" not in {node for node, _ in model.kept})
    assert attempt.run() == "done"
    assert model.running() == [(0, "two"), (1, "spare")]
    model.settle()
    assert model.running() == [(0, "two"), (1, "spare")], "what was lost does not run when it is back"
    assert model.journal["one", "s"].handed_to == "two"
    assert model.led("one") == []
    assert model.unfinished() == []
    assert Taking(model, "newer", BUDDIES).run() != "done", "the former coordinator takes no snapshot"


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("voters", VOTERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_participant_dies_at_any_event(loss: str, voters: str, fault: str, soon: bool, sampled: Sampler) -> None:
    for event, label in sampled(enumerate(labels(loss, voters)), 12):
        model, attempt = walked(loss, voters)
        model.faults[event] = FAULTS[fault]
        if soon:
            model.faults[event + 2] = JobModel.heal
        try:
            attempt.run()
            judge(model)
        except AssertionError as error:
            error.add_note(f"{fault} at event {event}, {label}")
            raise


@pytest.mark.parametrize("voters", VOTERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_former_coordinator_is_back_at_any_event(loss: str, voters: str) -> None:
    for event, label in enumerate(labels(loss, voters)):
        model, attempt = walked(loss, voters)
        model.faults[event] = JobModel.heal
        try:
            attempt.run()
            judge(model)
        except AssertionError as error:
            error.add_note(f"one is back at event {event}, {label}")
            raise


@pytest.mark.parametrize("voters", VOTERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_coordinator_is_lost_at_any_event_of_a_rollback(loss: str, voters: str) -> None:
    """Its record may say that the next incarnation is to run, and copies of it may be held."""

    def begun() -> tuple[JobModel, RollingBack]:
        model = JobModel()
        assert Taking(model, "s", VOTERS[voters]).run() == "done"
        model.settle()
        model.labels.clear()
        return model, RollingBack(model, "b", to=("one", "spare"))

    model, attempt = begun()
    assert attempt.run() == "done"
    for event in range(len(model.labels)):
        model, attempt = begun()
        model.faults[event] = LOSSES[loss]
        try:
            attempt.run()
            Protecting(model, "p").run()
            judge(model)
        except AssertionError as error:
            error.add_note(f"{loss} at event {event}, {model.labels[event]}")
            raise


def test_two_nodes_have_no_majority() -> None:
    """The third one does not answer when the snapshot begins, and is no witness."""
    model = JobModel()
    model.cut.add("spare")
    assert Taking(model, "s", WITH_WITNESS).run() == "done"
    model.settle()
    model.cut.add("one")
    assert Protecting(model, "p").run() == "waits"
    assert [copy.node for copy in model.copies if copy.running] == ["one"], "no other node takes over by itself"


# ---------------------------------------------------------------- mutations: each rule matters


def violated(run: Callable[[], object]) -> bool:
    try:
        run()
    except AssertionError as error:
        return any(text in str(error) for text in ("two incarnations run", "a rank runs twice", "two coordinators"))
    except (Lost, Refused, Died):
        return False
    return False


def _take_over(voters: str) -> None:
    for event in range(len(labels("one is cut off", voters))):
        model, attempt = walked("one is cut off", voters)
        model.faults[event] = JobModel.heal
        attempt.run()
        judge(model)


@pytest.mark.parametrize("voters", VOTERS)
def test_a_coordinator_that_does_not_obey_its_lease_is_found(voters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels("one is cut off", voters)
    monkeypatch.setattr(job_rules, "holds_lease", lambda *_: True)
    assert violated(lambda: _take_over(voters))


def test_a_coordinator_that_does_not_count_its_witness_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two voters it needs no lease, and runs on, while the other two follow a successor."""
    labels("one is cut off", "one is a witness")
    holds = job_rules.holds_lease

    def of_keepers(quorums: Collection[Collection[str]], *heard: Any) -> bool:
        return holds([set(voters) - {"spare"} for voters in quorums], *heard)

    monkeypatch.setattr(job_rules, "holds_lease", of_keepers)
    assert violated(lambda: _take_over("one is a witness"))


@pytest.mark.parametrize("voters", VOTERS)
def test_a_node_that_promises_too_early_is_found(voters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels("one is cut off", voters)

    def at_once(former: Former, ago_s: float, **_: bool) -> tuple[bool, str]:
        return former is not Former.THERE, ""

    monkeypatch.setattr(job_rules, "may_promise", at_once)
    assert violated(lambda: _take_over(voters))


@pytest.mark.parametrize("voters", VOTERS)
def test_a_node_that_promises_although_the_coordinator_is_there_is_found(
    voters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels("one is cut off", voters)
    monkeypatch.setattr(job_rules, "may_promise", lambda *_, **__: (True, ""))
    assert violated(lambda: _take_over(voters))


def test_a_job_that_is_resumed_before_its_former_incarnation_is_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_rules, "rollback_next", lambda _: (JobDecision.CLOSE, ""))

    def run() -> None:
        model = JobModel()
        assert Taking(model, "s", BUDDIES).run() == "done"
        model.settle()
        model.cut.add("two")
        RollingBack(model, "b").run()

    assert violated(run)
