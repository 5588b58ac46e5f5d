"""Tests what status and history show, also if nodes do not answer."""

from __future__ import annotations

from typing import Any

import pytest

from migrator.cli import status
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Unreachable
from tests.cli.conftest import MOVE, Migrator, a_record
from tests.cli.fake_daemon import FakeCluster


def test_status_merges_the_records_of_source_and_target(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [a_record("source")]
    cluster["spare-1"].moves = [a_record("target")]
    (move,) = migrator("status", "--json").json["moves"]
    assert (move["move"], move["source"], move["target"]) == (MOVE, "node-1", "spare-1")
    assert (move["outcome"], move["where"]) == ("unknown", "frozen on source")
    assert [(view["node"], view["role"], view["mark"]) for view in move["views"]] == [
        ("node-1", "source", "streamed"),
        ("spare-1", "target", "held"),
    ]
    row = migrator("status").out.splitlines()[1]
    assert "streamed / held" in row
    assert "node-1: the driver decides; spare-1: only the source knows how this ends" in row


def test_move_is_in_history_only_when_source_and_target_have_ended(cluster: FakeCluster, migrator: Migrator) -> None:
    other = "m-ffffffffffff"
    done: dict[str, Any] = {"outcome": pb.COMMIT, "ended_unix_s": 1500.0, "pause_s": 0.9, "bytes": 1_000_000_000}
    # The target has ended the first move, but the source has not: it is not in the history yet.
    cluster["node-1"].moves = [a_record("source", outcome=pb.COMMIT), a_record("source", other, **done)]
    ran = {**done, "mark": "activated"}
    cluster["spare-1"].moves = [a_record("target", **ran), a_record("target", other, **ran)]
    (open_move,) = migrator("status", "--json").json["moves"]
    assert (open_move["move"], open_move["outcome"], open_move["where"]) == (MOVE, "moved", "running on target")
    (ended,) = migrator("history", "--json").json["moves"]
    assert (ended["move"], ended["outcome"], ended["pause_s"], ended["bytes"]) == (other, "moved", 0.9, 1_000_000_000)
    assert "0.9 s          -  1.0 GB" in migrator("history").out


def test_history_is_newest_first_and_limited(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [
        a_record(
            "source", f"m-00000000000{number}", ended_unix_s=1000.0 + number, outcome=pb.ABORT, reason="interrupted"
        )
        for number in range(5)
    ]
    moves = migrator("history", "--limit", "2", "--json").json["moves"]
    assert [move["move"] for move in moves] == ["m-000000000004", "m-000000000003"]
    assert {move["outcome"] for move in moves} == {"undone"}
    assert "3 older lines" in migrator("history", "--limit", "2").out


def test_status_of_one_move_shows_its_details(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].moves = [a_record("source", reason="silent driver", decided_by="source", outcome=pb.ABORT)]
    ran = migrator("status", MOVE)
    assert ran.code == 0
    assert f"{MOVE}  rank 1 of job train  node-1 → spare-1" in ran.out
    assert "frozen on source (node-1)" in ran.out
    assert "silent driver" in ran.out
    assert migrator("status", MOVE, "--json").json["decided_by"] == "source"


def a_gate(*ranks: int, **changes: Any) -> pb.ClosedGate:
    result: dict[str, Any] = {"move": MOVE, "job": "train", "ranks": ranks, "since_unix_s": 1000.0}
    return pb.ClosedGate(**result | changes)


def test_status_shows_ranks_that_wait_at_a_closed_gate(cluster: FakeCluster, migrator: Migrator) -> None:
    """Shows which rank waits, for which move and since when, even if no move is in progress."""
    assert migrator("status", "--json").json["gates"] == []
    cluster["node-2"].gates = [a_gate(3, 1, waiting_for="the source has not decided yet", user_id=1500)]
    cluster["node-1"].gates = [a_gate(0)]
    ran = migrator("status")
    assert ran.out.startswith("no moves in progress")
    heads, *rows = ran.out.splitlines()[2:]
    assert " ".join(heads.split()) == " ".join(status.GATE_HEADS)
    assert [row.split()[:4] for row in rows] == [
        [MOVE, "train", "0", "node-1"],
        [MOVE, "train", "1", "node-2"],
        [MOVE, "train", "3", "node-2"],
    ]
    assert rows[0].endswith("-")
    assert rows[1].endswith("the source has not decided yet")
    assert migrator("status", "--json").json["gates"][1] == {
        "node": "node-2",
        "move": MOVE,
        "job": "train",
        "rank": 1,
        "since_unix_s": 1000.0,
        "waiting_for": "the source has not decided yet",
        "user_id": 1500,
    }


def test_status_of_one_move_shows_only_its_gates(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-2"].gates = [a_gate(1), a_gate(7, move="m-ffffffffffff", job="other")]
    only = migrator("status", MOVE)  # neither source nor target has a record of it
    assert (only.code, len(only.out.splitlines())) == (0, 2)
    assert [gate["rank"] for gate in migrator("status", MOVE, "--json").json["gates"]] == [1]
    cluster["node-1"].moves = [a_record("source")]
    assert "gate of rank 1: closed on node-2 for" in migrator("status", MOVE).out
    assert [gate["rank"] for gate in migrator("status", MOVE, "--json").json["gates"]] == [1]


@pytest.mark.parametrize("verb", ["status", "recover"])
def test_unknown_move_is_not_found_only_if_all_nodes_answer(
    cluster: FakeCluster, migrator: Migrator, verb: str
) -> None:
    assert migrator(verb, MOVE).code == NotFound.exit_code
    cluster.stop("node-2")  # which may have a record
    assert migrator(verb, MOVE).code == Unreachable.exit_code
