"""A move whose rank changes between preflight and the freeze is tried again by itself; no other failure is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from migrator.driver import ATTEMPTS
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, CriuFailed, Refused, SnapshotError, Undone, Unreachable, Where
from tests.cli.conftest import Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster

CHANGED = Changed("devices: the rank has opened /dev/kmsg", remedy="close it", where=Where.SOURCE_FROZEN)


class Fails(dict[str, SnapshotError]):
    """The failures of a daemon: one method fails so many times, then something happens."""

    def __init__(
        self, method: str, error: SnapshotError, times: int, then: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__({method: error})
        self.left, self.then = times, then

    def get(self, method: str, default: object = None) -> SnapshotError | None:  # type: ignore[override]
        if method not in self or self.left == 0:
            return None
        self.left -= 1
        if self.left == 0:
            self.then()
        return self[method]


def test_move_succeeds_although_the_rank_changed_at_first(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].failures = Fails("Stream", CHANGED, ATTEMPTS - 1)
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == 0
    assert ran.err.count("was undone, trying again: devices: the rank has opened /dev/kmsg") == ATTEMPTS - 1
    moves = {request.move for method, request in cluster["node-1"].asked if method == "Begin"}
    assert len(moves) == ATTEMPTS, "each attempt is a move of its own"
    assert cluster["node-1"].called("Inspect") == ["Inspect"] * ATTEMPTS
    looks = [request.look for method, request in cluster["node-1"].asked if method == "Begin"]
    assert looks == [f"look {number + 1}" for number in range(ATTEMPTS)], "with what its own preflight found"


def test_rank_that_keeps_changing_is_given_up(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].failures["Stream"] = CHANGED
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["error"]) == (Undone.exit_code, "undone", "changed")
    assert ran.json["attempts"] == ATTEMPTS
    assert [text.partition(":")[0] for text in ran.json["warnings"]] == ["attempt 1", "attempt 2"]
    assert cluster["node-1"].called("Freeze") == ["Freeze"] * ATTEMPTS


def test_refusal_of_a_later_attempt_is_undone_because_the_job_was_paused(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    refusal = pb.Check(name="devices", verdict=pb.Check.REFUSE, reason="open: /dev/kmsg", remedy="close it")
    target = cluster["spare-1"]
    cluster["node-1"].failures = Fails("Stream", CHANGED, 1, then=lambda: target.checks.append(refusal))
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["attempts"]) == (Undone.exit_code, "undone", 2)
    assert "devices: open: /dev/kmsg" in ran.json["reason"]


@pytest.mark.parametrize("error", [Refused("nccl: no cut"), CriuFailed("Error: no")])
def test_other_failures_are_not_tried_again(cluster: FakeCluster, migrator: Migrator, error: SnapshotError) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].failures["Stream"] = error
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["attempts"]) == (Undone.exit_code, 1)


def test_node_that_is_lost_between_attempts_does_not_hide_the_undone_one(
    cluster: FakeCluster, migrator: Migrator
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    failures = cluster["spare-1"].failures
    lost = Unreachable("spare-1 does not answer")
    cluster["node-1"].failures = Fails("Stream", CHANGED, 1, then=lambda: failures.update(Examine=lost))
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["where"]) == (Undone.exit_code, "undone", Where.SOURCE_RUNNING)
