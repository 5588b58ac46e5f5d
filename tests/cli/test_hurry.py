"""A rank of which a snapshot is being copied does not move: a driver that wants to has the copy sent without its limit."""

from __future__ import annotations

import pytest

from migrator.cluster import Cluster
from migrator.job_results import JobOptions
from migrator.jobs import snapshot, suspend
from snapshotd.api.errors import Busy
from tests.cli.conftest import MOVE, Migrator, a_rank
from tests.cli.fake_daemon import FakeCluster

SENT = "a copy of its snapshot is being sent"


@pytest.fixture
def copied(cluster: FakeCluster) -> FakeCluster:
    """A job of two ranks, of which the copy of one is on its way."""
    for number, node in enumerate(("node-1", "node-2")):
        cluster[node].ranks = [a_rank(node, number, moving=MOVE if number == 0 else "")]
    cluster["node-1"].copying = {MOVE}
    return cluster


def hurried(cluster: FakeCluster) -> list[str]:
    return [request.move for method, request in cluster["node-1"].asked if method == "Hurry"]


def test_move_waits_for_a_copy_and_has_it_sent_without_a_limit(copied: FakeCluster, migrator: Migrator) -> None:
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Busy.exit_code
    assert SENT in ran.err
    assert hurried(copied) == [MOVE]
    assert not copied["node-2"].called("Hurry")


def test_check_changes_nothing(copied: FakeCluster, migrator: Migrator) -> None:
    assert migrator("check", "--rank", "0", "--to", "spare-1").code == Busy.exit_code
    assert hurried(copied) == []


def test_rank_that_is_moved_or_has_an_older_daemon_is_busy_as_before(copied: FakeCluster, migrator: Migrator) -> None:
    copied["node-1"].copying = set()
    moved = migrator("move", "--rank", "0", "--to", "spare-1")
    copied["node-1"].unknown.add("Hurry")
    older = migrator("move", "--rank", "0", "--to", "spare-1")
    for ran in (moved, older):
        assert ran.code == Busy.exit_code
        assert "rank 0 is being moved already" in ran.err
        assert SENT not in ran.err


async def test_suspension_has_it_sent_without_a_limit_and_a_snapshot_does_not(copied: FakeCluster) -> None:
    cluster = Cluster.read(copied.path)
    with pytest.raises(Busy, match="rank 0 is being moved"):
        await snapshot(cluster, JobOptions("train"), lambda event: None)
    assert hurried(copied) == []
    with pytest.raises(Busy, match=SENT):
        await suspend(cluster, JobOptions("train"), lambda event: None)
    assert hurried(copied) == [MOVE]
