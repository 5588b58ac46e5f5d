"""Tests that the table is complete, ordered and divided by COMMIT, and the driver's verdict for all inputs."""

from __future__ import annotations

import pytest

from migrator.driver.steps import STEPS
from migrator.protocol import (
    ACTIVATE,
    COMMIT,
    PREPARE,
    SERVICE,
    TABLE,
    UNDO,
    Asked,
    Step,
    Verdict,
    decide,
    diagram,
    index_of,
    undo_plan,
)
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Where

BEGIN = index_of("Begin")
OUTCOMES = ("COMMIT", "ABORT", "UNDECIDED", None)


def has_rpc(name: str) -> bool:
    service, method = name.split(".")
    return method in pb.DESCRIPTOR.services_by_name[service].methods_by_name


def test_steps_are_in_order() -> None:
    assert [step.action for step in TABLE] == [
        *("Inspect", "Examine", "InspectConnections"),
        *("Prepare", "Begin", "PrepareDevice", "SuspendTimeouts"),
        *("Quiesce", "Detach", "Freeze", "Hold", "Stream", "Restore", "Attach", "Repoint"),
        *("Commit", "Activate", "Open", "Settle", "Release"),
    ]


def test_every_step_has_a_function() -> None:
    assert list(STEPS) == [step.action for step in TABLE]


@pytest.mark.parametrize("step", [*TABLE, *UNDO], ids=lambda step: f"{step.phase}-{step.action}")
def test_every_step_names_existing_rpcs(step: Step) -> None:
    assert step.calls
    assert all(map(has_rpc, step.calls))
    assert all(has_rpc(f"Gate.{call}") for call in step.fans_out)
    assert step.timeout_s > 0
    assert step.does


def test_undo_may_take_as_long_as_what_it_undoes() -> None:
    """Abort takes communicators down and builds them again, as Detach and Attach do."""
    (abort,) = [step for step in UNDO if step.action == "Abort"]
    assert abort.timeout_s >= max(TABLE[index_of(action)].timeout_s for action in ("Detach", "Attach"))


@pytest.mark.parametrize("step", TABLE, ids=lambda step: step.action)
def test_every_step_is_undone_by_an_undo_step(step: Step) -> None:
    assert set(step.undone_by) <= {undo.action for undo in UNDO}
    own = {Asked.SOURCE: "Abort", Asked.TARGET: "Discard", Asked.PEERS: "Settle", Asked.JOB: "Open"}[step.asked]
    assert not step.undone_by or own in step.undone_by, "the daemons that did it are asked to undo it"


def test_commit_divides_the_table() -> None:
    """Before COMMIT the rank is on the source and every change can be undone. From COMMIT on nothing is undone."""
    for index, step in enumerate(TABLE):
        on_source = step.where in (Where.SOURCE_RUNNING, Where.SOURCE_FROZEN)
        assert on_source == (index < COMMIT)
        assert bool(step.undone_by) == (PREPARE <= index < COMMIT)


def test_where_the_rank_is_after_each_step() -> None:
    assert [step.where for step in TABLE] == [
        *[Where.SOURCE_RUNNING] * 9,
        *[Where.SOURCE_FROZEN] * 6,
        Where.TARGET_HELD,
        *[Where.TARGET_RUNNING] * 4,
    ]


def test_target_and_peers_are_asked_before_anything_is_paused() -> None:
    before = {step.asked for step in TABLE[: index_of("Quiesce")]}
    assert before == {Asked.SOURCE, Asked.TARGET, Asked.PEERS}


def test_communicators_are_down_from_before_the_freeze_until_after_the_restore() -> None:
    """NCCL's own threads and sockets cannot be dumped. The outcome is decided only when communicators are complete."""
    order = ["Quiesce", "Detach", "Freeze", "Restore", "Attach", "Commit"]
    assert [step.action for step in TABLE if step.action in order] == order
    assert {step.action for step in TABLE if step.only_with_nccl} == {"Quiesce", "Detach", "Attach", "Open"}


def test_steps_with_several_calls_declare_them() -> None:
    assert {step.action: step.calls for step in TABLE if step.rounds_of} == {
        "Quiesce": ("Gate.Close", "Gate.SetTargets")
    }
    assert {step.action for step in TABLE if step.fans_out} == {"Detach", "Attach"}
    assert all(step.calls == (f"{SERVICE[step.asked]}.{step.action}",) for step in TABLE if not step.rounds_of)


def test_gates_open_right_after_the_rank_runs() -> None:
    assert index_of("Open") == ACTIVATE + 1


def test_peers_are_re_pointed_last_before_commit_and_settled_once_the_rank_runs() -> None:
    """Their connections are blocked in between, and COMMIT can be overruled until the target has activated its copy."""
    assert (index_of("Repoint"), index_of("Settle")) == (COMMIT - 1, ACTIVATE + 2)


@pytest.mark.parametrize("reached", range(len(TABLE) + 1))
def test_undo_asks_the_source_first(reached: int) -> None:
    plan = [step.action for step in undo_plan(reached)]
    early = {0: [], 1: [], 2: [], 3: ["Discard"], 4: ["Abort", "Discard"], 5: ["Abort", "Discard"]}
    opened = ["Open"] if reached > 6 else []
    assert plan == early.get(reached, ["Abort", "Settle", *opened, "Discard"] if reached <= COMMIT else [])


@pytest.mark.parametrize("reached", range(len(TABLE) + 1))
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_verdict_follows_the_outcome(reached: int, outcome: str | None) -> None:
    verdict, reason = decide(reached, outcome)
    assert reason
    match outcome:
        case "COMMIT":
            expected = Verdict.MOVED if reached > ACTIVATE else Verdict.UNKNOWN
            assert verdict is expected, "moved only once it was seen running"
        case "ABORT":
            assert verdict is Verdict.UNDONE
        case _:
            assert verdict is (Verdict.UNDONE if reached < BEGIN else Verdict.UNKNOWN)


def test_diagram_shows_every_step_once_with_commit_as_a_line() -> None:
    head, *rows, legend = diagram().splitlines()
    assert head.split()[:2] == ["PHASE", "STEP"]
    assert legend.startswith("[NCCL]")
    commit_line = next(index for index, line in enumerate(rows) if "only the target may run" in line)
    assert commit_line == COMMIT
    del rows[commit_line]
    for step, row in zip(TABLE, rows, strict=True):
        assert row.split()[:2] == [step.phase, step.action]
        assert step.does in row
        assert row.endswith(", ".join(step.undone_by))
        assert ("[NCCL]" in row) == step.only_with_nccl
    assert diagram() == diagram(TABLE)
    assert max(map(len, diagram().splitlines())) <= 120
