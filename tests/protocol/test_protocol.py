"""The table itself: complete, in order, COMMIT as the watershed; and the driver's verdict over all inputs."""

from __future__ import annotations

import pytest

from migrator import protocol
from migrator.protocol import COMMIT, TABLE, At, Verdict, decide, diagram, next_step, undo_plan, where_after
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Where

ACTIVATE = next(index for index, step in enumerate(TABLE) if step.action == "Activate")
BEGIN = next(index for index, step in enumerate(TABLE) if step.action == "Begin")
OUTCOMES = ("COMMIT", "ABORT", "UNDECIDED", None)


def test_the_steps_in_order() -> None:
    assert [step.action for step in TABLE] == [
        *(
            "Inspect",
            "Examine",
            "InspectConnections",
            "Prepare",
            "Begin",
            "PrepareDevice",
            "SuspendTimeouts",
            "Quiesce",
            "Detach",
            "Freeze",
            "Stream",
            "Restore",
        ),
        *("Attach", "Repoint", "Commit", "Activate", "Open", "Settle", "Release"),
    ]


def test_next_step_walks_the_table_and_ends() -> None:
    assert [next_step(done) for done in range(len(TABLE) + 1)] == [*TABLE, None]


@pytest.mark.parametrize("step", TABLE, ids=lambda step: step.action)
def test_every_step_and_its_undo_is_a_request_of_the_service_it_is_asked_of(step: protocol.Step) -> None:
    services = pb.DESCRIPTOR.services_by_name
    service, undo = {
        At.SOURCE: ("Source", "Open" if step.action in protocol.NCCL_ALONE else "Abort"),
        At.TARGET: ("Target", "Discard"),
        At.PEERS: ("Peer", "Settle"),
        At.JOB: ("Gate", "Open"),
    }[step.at]
    requests = ("Close", "Report", "SetTargets") if step.action == "Quiesce" else (step.action,)
    assert set(requests) <= set(services[service].methods_by_name)
    assert step.undo in ("", undo)
    assert step.timeout_s > 0
    assert step.says


def test_commit_separates() -> None:
    """Before it the rank is at the source and what was done has an undo; from it on there is no undo."""
    for index, step in enumerate(TABLE):
        at_source = step.where in (Where.SOURCE_RUNNING, Where.SOURCE_FROZEN)
        assert at_source == (index < COMMIT)
        assert bool(step.undo) == (step.phase != "preflight" and index < COMMIT)


def test_the_target_and_the_peers_are_asked_before_anything_is_paused() -> None:
    paused = [index for index, step in enumerate(TABLE) if step.where is Where.SOURCE_FROZEN]
    assert [step.action for step in TABLE[: paused[0]]] == [
        *(
            "Inspect",
            "Examine",
            "InspectConnections",
            "Prepare",
            "Begin",
            "PrepareDevice",
            "SuspendTimeouts",
            "Quiesce",
            "Detach",
        ),
    ]


def test_communicators_are_down_from_before_the_freeze_until_the_copy_is_restored() -> None:
    """NCCL's own threads and sockets cannot be dumped; and the outcome is decided only when they are whole again."""
    order = [
        step.action for step in TABLE if step.action in ("Quiesce", "Detach", "Freeze", "Restore", "Attach", "Commit")
    ]
    assert order == ["Quiesce", "Detach", "Freeze", "Restore", "Attach", "Commit"]
    assert {"Quiesce", "Detach", "Attach", "Open"} == protocol.NCCL_ALONE


def test_the_gates_open_when_the_rank_runs_and_before_anything_is_cleaned() -> None:
    opened = next(index for index, step in enumerate(TABLE) if step.action == "Open")
    assert opened == ACTIVATE + 1


def test_the_peers_are_the_last_before_commit_and_settled_once_the_rank_runs() -> None:
    """They are silent from re-point to settle; before the target has let its copy go a COMMIT may be taken back."""
    peers = [index for index, step in enumerate(TABLE) if step.action in ("Repoint", "Settle")]
    assert peers == [COMMIT - 1, ACTIVATE + 2]


@pytest.mark.parametrize("reached", range(len(TABLE) + 1))
def test_undo_asks_the_source_first(reached: int) -> None:
    plan = [step.action for step in undo_plan(reached)]
    early = {0: [], 1: [], 2: [], 3: ["Discard"], 4: ["Abort", "Discard"], 5: ["Abort", "Discard"]}
    opened = ["Open"] if reached > 6 else []
    assert plan == early.get(reached, ["Abort", "Settle", *opened, "Discard"] if reached <= COMMIT else [])
    assert all(step.undo == "" for step in undo_plan(reached))


@pytest.mark.parametrize("reached", range(len(TABLE) + 1))
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_decide(reached: int, outcome: str | None) -> None:
    verdict, reason = decide(reached, outcome)
    assert reason
    match outcome:
        case "COMMIT":
            assert verdict is (Verdict.MOVED if reached > ACTIVATE else Verdict.UNKNOWN), (
                "MOVED once it is seen running"
            )
        case "ABORT":
            assert verdict is Verdict.UNDONE
        case _:
            assert verdict is (Verdict.UNDONE if reached < BEGIN else Verdict.UNKNOWN)


def test_where_after_each_step() -> None:
    assert [where_after(done) for done in range(len(TABLE) + 1)] == [
        *[Where.SOURCE_RUNNING] * 10,
        *[Where.SOURCE_FROZEN] * 5,
        Where.TARGET_HELD,
        *[Where.TARGET_RUNNING] * 4,
    ]


def test_the_diagram_shows_every_step_once_and_commit_between() -> None:
    lines = diagram().splitlines()
    assert len(lines) == len(TABLE) + 1
    line_of_commit = next(
        index for index, line in enumerate(lines) if "only the target may run" in line and "─" in line
    )
    rows = lines[:line_of_commit] + lines[line_of_commit + 1 :]
    for step, row in zip(TABLE, rows, strict=True):
        assert row.split()[:2] == [step.phase, step.action]
        assert step.says in row
        assert row.endswith(f"undo: {step.undo}") == bool(step.undo)
    assert line_of_commit == COMMIT
    assert diagram() == diagram(TABLE)
    assert max(map(len, lines)) <= 120
