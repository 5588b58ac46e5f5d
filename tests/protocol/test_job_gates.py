"""Every event of suspending, resuming, snapshotting and rolling back a job whose ranks are in a communicator, with every
participant dying at it: one incarnation; no gate opens before COMMIT, or in front of a communicator that is not whole; and
no gate stays closed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from migrator.job_protocol import RESUME, SNAPSHOT, SUSPEND, JobStep
from snapshotd.moves.job_rules import Part
from snapshotd.moves.rules import GateDecision, GateFacts, Mark, Outcome
from tests.protocol import job_gating
from tests.protocol.job_driver import RPC, Attempt, Protecting, RollingBack, Taking
from tests.protocol.job_gating import JobGating, gate_of
from tests.protocol.job_model import JobModel
from tests.protocol.job_world import DRIVER, NODES, Copy, Lost, Refused
from tests.protocol.test_jobs import FAULTS
from tests.sampling import Sampler

Walk = Callable[[], tuple[JobModel, Callable[[], str]]]


def _job() -> JobModel:
    return JobModel(nccl=True)


def _snapshotted(loss: Callable[[JobModel], None] | None = None) -> JobModel:
    model = _job()
    assert Taking(model, "before", (("spare",), ("one",))).run() == "done"
    if loss is not None:
        loss(model)
    return model


def _suspended() -> JobModel:
    model = _job()
    assert Attempt(model, "before").run() == "done"
    model.settle()
    return model


def _rank_dies(model: JobModel) -> None:
    for copy in model.copies:
        if copy.rank == 1:
            copy.alive = copy.running = False
    model.killed = True


def _walk(model: JobModel, attempt: Attempt | RollingBack | Protecting) -> tuple[JobModel, Callable[[], str]]:
    model.labels.clear()
    return model, attempt.run


def _then(make: Callable[[], JobModel], attempt: Callable[[JobModel], Attempt | RollingBack | Protecting]) -> Walk:
    def walk() -> tuple[JobModel, Callable[[], str]]:
        model = make()
        return _walk(model, attempt(model))

    return walk


#: A job, and what a driver does with it. A loss comes first in some, right after the snapshot was reported.
WALKS: dict[str, Walk] = {
    "suspend": _then(_job, lambda model: Attempt(model, "s")),
    "resume": _then(_suspended, lambda model: Attempt(model, "s", "before")),
    "snapshot": _then(_job, lambda model: Taking(model, "s")),
    "second snapshot": _then(_snapshotted, lambda model: Taking(model, "s", (("spare",), ("one",)))),
    "rank died": _then(lambda: _snapshotted(_rank_dies), lambda model: RollingBack(model, "s")),
    "two has no power": _then(
        lambda: _snapshotted(lambda model: model.reboot("two")), lambda model: RollingBack(model, "s")
    ),
    "two is cut off": _then(
        lambda: _snapshotted(lambda model: model.cut.add("two")), lambda model: RollingBack(model, "s")
    ),
    "one has no power": _then(
        lambda: _snapshotted(lambda model: model.reboot("one")), lambda model: Protecting(model, "s")
    ),
    "one is cut off": _then(
        lambda: _snapshotted(lambda model: model.cut.add("one")), lambda model: Protecting(model, "s")
    ),
}


@cache
def labels(name: str) -> tuple[str, ...]:
    model, run = WALKS[name]()
    assert run() == "done"
    return tuple(model.labels)


def judge(model: JobModel) -> None:
    """The job runs with its communicator, or is suspended, or can be rolled back; no gate stays closed."""
    model.settle(rounds=8)
    assert model.unfinished() == []
    running = [copy for copy in model.copies if copy.alive]
    assert all(copy.running and not copy.gated for copy in running), f"a rank waits for ever: {running}"
    assert model.killed or not any(copy.lost for copy in running), "nothing has died, and a communicator was given up"
    if len(running) == 2 and all(copy.comm for copy in running):
        return
    if set(model.images.values()) == {0, 1} and not running:
        records = [(n, r) for (_, n), r in model.journal.items() if r.role == "job" and not r.kind and not r.suspension]
        name = next(n for n, r in records if r.outcome is Outcome.COMMIT)
        assert Attempt(model, "again", name).run() == "done"
    elif model.snapshot():
        assert Protecting(model, "again").run() == "done"
    else:
        assert model.killed, "no rank died, and the job is gone"
        return
    model.settle()
    assert [(copy.running, copy.gated, bool(copy.comm)) for copy in model.copies if copy.alive] == 2 * [
        (True, False, True)
    ]


def walked_with(name: str, faults: dict[int, Callable[[JobModel], None]]) -> None:
    """Runs a walk in which these faults strike at these events."""
    model, run = WALKS[name]()
    model.faults, first = dict(faults), min(faults, default=0)
    try:
        run()
        judge(model)
    except AssertionError as error:
        error.add_note(f"{name}, a fault at event {first}: {labels(name)[first]}")
        raise


def test_without_faults_a_job_is_at_one_cut_without_communicators_when_it_is_dumped() -> None:
    for name in ("suspend", "snapshot"):
        places = [
            labels(name).index(label)
            for label in (
                "two: close the gates",
                "one: take the communicator down",
                "two: take the communicator down",
                "one: frozen",
                "one: dump",
            )
        ]
        assert places == sorted(places), name
    said = labels("rank died")
    assert (
        said.index("spare: build the communicator") < said.index("one: mark activated") < said.index("one: open a gate")
    )


@pytest.mark.parametrize(("name", "table"), [("suspend", SUSPEND), ("resume", RESUME), ("snapshot", SNAPSHOT)])
def test_the_walk_asks_for_every_call_of_the_table(name: str, table: tuple[JobStep, ...]) -> None:
    for step in table:
        if rpc := RPC[step.call]:
            assert any(label.startswith(f"driver: {rpc}") for label in labels(name)), step.call


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", WALKS)
def test_any_participant_dies_at_any_event(name: str, fault: str, soon: bool, sampled: Sampler) -> None:
    """What died comes back at the next event but one, or only when the driver has given up."""
    for event in sampled(range(len(labels(name))), 10):
        walked_with(name, {event: FAULTS[fault], **({event + 2: JobModel.heal} if soon else {})})


@pytest.mark.parametrize("name", ["snapshot", "second snapshot", "rank died", "two has no power"])
@pytest.mark.parametrize("then", ["driver dies", "daemon of one dies", "spare is cut off"])
@pytest.mark.parametrize("first", ["daemon of one dies", "daemon of two dies", "two reboots"])
def test_two_participants_die(name: str, first: str, then: str, sampled: Sampler) -> None:
    count = len(labels(name))
    pairs = [(event, later) for event in range(count) for later in range(event + 1, min(count, event + 4))]
    for event, later in sampled(pairs, 20):
        walked_with(name, {event: FAULTS[first], later: FAULTS[then]})


@pytest.mark.parametrize("name", ["snapshot", "second snapshot", "suspend"])
def test_a_rank_dies_at_any_event(name: str) -> None:
    """The others get NCCL's errors, or go on without it; no gate stays closed."""
    for event in range(len(labels(name))):
        walked_with(name, {event: _rank_dies})


def test_a_node_that_is_lost_before_any_snapshot_counts_does_not_keep_the_gates_closed() -> None:
    """The communicators are given up when it has been silent for GONE_S: the job gets NCCL's errors, as without us."""
    model, run = WALKS["snapshot"]()
    model.faults[labels("snapshot").index("two: take the communicator down")] = lambda model: model.reboot("two")
    assert run() in ("undone", "")
    model.faults.clear()
    record = model.journal["one", "s"]
    assert model.journal["one", gate_of("s")].members[0].gated
    with pytest.raises(Lost):
        model.put_back("one", "s")
    model.gone.add(("one", "two"))
    assert record.outcome is Outcome.ABORT
    model.settle_store("one", "s-0")
    assert model.put_back("one", "s"), "it was given up"
    (rank,) = [copy for copy in model.copies if copy.alive]
    assert (rank.gated, rank.lost) == (False, True)


def test_the_next_snapshot_does_not_wait_for_a_coordinator_that_was_lost_during_one() -> None:
    """It was lost with the gates closed, and never comes back."""
    model = _snapshotted()
    model.labels.clear()
    model.faults[labels("second snapshot").index("two: close the gates")] = lambda model: model.reboot("one")
    assert Taking(model, "late", (("spare",), ("one",))).run() in ("undone", "")
    model.faults.clear()
    assert Protecting(model, "p").run() == "done"
    model.settle_gate("two", gate_of("late"))
    assert model.journal["two", gate_of("late")].ended
    newer = Taking(model, "newer", (("spare",), ("two",)))
    newer.at = next(node for node in NODES if model.led(node) and model.up[node])
    assert newer.run() == "done"


# ---------------------------------------------------------------- mutations: each rule matters


def found(*names: str) -> str:
    """What the model finds in these walks, with any participant dying at any event; empty: nothing."""
    for name in names:
        for fault in ("", *FAULTS):
            for event in range(len(labels(name))):
                try:
                    walked_with(name, {event: FAULTS[fault]} if fault else {})
                except AssertionError as error:
                    return str(error) or "a rank or a record is left"
    return ""


@pytest.fixture
def walks() -> None:
    """The walks without faults are recorded before a rule is changed."""
    for name in WALKS:
        labels(name)


@pytest.mark.usefixtures("walks")
class TestMutations:
    def test_ranks_that_are_frozen_with_their_communicators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobGating, "on_job_detach", lambda *_: None)
        assert "an image has a communicator" in found("snapshot")

    def test_communicators_that_change_before_all_gates_are_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = JobGating.on_close_gates

        def only_some(model: JobGating, node: str, name: str) -> object:
            right(model, node, name)
            for copy in model.journal[node, gate_of(name)].members:
                copy.gated = node != "two"
            return None

        monkeypatch.setattr(JobGating, "on_close_gates", only_some)
        assert "a gate is open, and the communicator is not whole" in found("snapshot")

    def test_gates_that_open_before_the_communicators_are_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def at_once(model: JobGating, node: str, copy: Copy, *, abandoned: bool = False) -> None:
            copy.gated = False
            model.check()

        monkeypatch.setattr(JobGating, "open_gate", at_once)
        monkeypatch.setattr(JobGating, "build", lambda *_: None)
        assert "in front of a communicator that is down" in found("snapshot")

    def test_a_copy_whose_gate_opens_when_it_is_attached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = JobGating.on_build

        def and_opens(model: JobGating, node: str, name: str, number: str) -> object:
            right(model, node, name, number)
            for record in model.held_copies(node, name):
                assert record.copy is not None
                record.copy.running, record.copy.gated = True, False
            model.check()
            return None

        monkeypatch.setattr(JobGating, "on_build", and_opens)
        assert "before COMMIT" in found("rank died")

    def test_commit_of_copies_without_communicators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = JobModel.on_part

        def ready(model: JobModel, node: str, move: str) -> object:
            said = right(model, node, move)
            return Part.READY if said is Part.WORKING else said

        monkeypatch.setattr(JobModel, "on_part", ready)
        monkeypatch.setattr(JobGating, "on_job_attach", lambda *_: None)
        assert found("resume")

    def test_a_record_that_is_settled_before_its_gates_are_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nodes ask for it, hear that all is over, and give up communicators although nothing has died."""
        monkeypatch.setattr(JobGating, "put_back", lambda *_: False)
        assert "given up" in found("snapshot")

    def test_gates_that_open_in_the_word_of_a_coordinator_that_has_not_settled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(JobGating, "on_job_settled", lambda *_: True)
        assert found("snapshot", "suspend")

    def test_a_rebuild_that_leaves_what_some_members_have_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A coordinator that died while it built them must take them down first."""

        def keeps(model: JobGating, node: str, name: str) -> object:
            if model.builds == 1:  # before the first attempt to build them again
                for copy in model.still_closed(node, name).members:
                    model.change(node, copy, 0)
            return None

        monkeypatch.setattr(JobGating, "on_take_down", keeps)
        assert "not whole" in found("snapshot")

    def test_a_gate_that_only_its_coordinator_may_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def waits(facts: GateFacts) -> tuple[GateDecision, str]:
            return (GateDecision.OPEN, "") if facts.outcome is not None else (GateDecision.ASK, "")

        monkeypatch.setattr(job_gating, "gate_next", waits)
        with pytest.raises(AssertionError, match="ended"):
            test_the_next_snapshot_does_not_wait_for_a_coordinator_that_was_lost_during_one()

    def test_a_snapshot_that_is_reported_before_it_is_confirmed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The node of a rank that is not bound is lost: the job cannot be rolled back without an operator."""
        monkeypatch.setattr(JobModel, "on_job_confirm", lambda *_: None)
        monkeypatch.setattr(JobModel, "on_release", lambda *_: None)
        model = _snapshotted(lambda model: model.cut.add("two"))
        assert RollingBack(model, "b").run() == "refused"


def test_rules_of_a_gate_that_a_coordinator_opens() -> None:
    model = _job()
    model.call(DRIVER, "one", "job_begin", "s", "", "one s-0 one s-0", "two s-1 two s-1")
    for node in ("one", "two"):
        model.call(DRIVER, node, "close_gates", "s")
    with pytest.raises(Refused):
        model.open_gate("two", Copy(1, "two", "", running=True, comm=0, gated=True))
    model.settle_gate("two", gate_of("s"))
    assert model.journal["two", gate_of("s")].mark is Mark.GATED, "the coordinator has not decided"
