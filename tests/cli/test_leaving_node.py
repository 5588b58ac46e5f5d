"""Why a node is not removed from the cluster, and which jobs need it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from migrator.cli import leaving_node
from migrator.cluster import Cluster
from migrator.jobs import succession
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, Refused
from tests.cli.fake_daemon import FakeCluster


def snapshot(job: str = "night") -> pb.JobRecord:
    """Kept on node-1 and node-2, with a vote for spare-1."""
    part = pb.Participant(rank_uid=f"{job}-0", node="node-1", copy="m-0000000000bb", copy_node="node-2")
    voters = pb.Voters(nodes=["node-1", "node-2", "spare-1"])
    record = pb.JobRecord(record="m-0000000000aa", job=job, kind="snapshot", outcome=pb.COMMIT, participants=[part])
    record.quorums.append(voters)
    return record


@pytest.fixture
def asked(cluster: FakeCluster) -> Cluster:
    return Cluster.read(cluster.path)


def test_node_that_keeps_images_or_has_a_vote_is_told(cluster: FakeCluster, asked: Cluster) -> None:
    cluster["node-1"].jobs = [snapshot(), snapshot("day")]
    cluster["node-1"].jobs[1].ended_by = "dropped: replaced"
    for node in ("node-2", "spare-1"):
        assert leaving_node.check(asked, node, force=False).jobs == ["night"]
    assert leaving_node.check(asked, "node-1", force=True).jobs == ["night"]
    cluster["node-1"].jobs[0].quorums[0].nodes.remove("spare-1")
    assert leaving_node.check(asked, "spare-1", force=False).jobs == []
    cluster.stop("node-2")
    assert leaving_node.check(asked, "node-2", force=False).jobs == ["night"], "it is no reason to keep the node"


def test_node_that_coordinates_snapshots_is_not_removed(cluster: FakeCluster, asked: Cluster) -> None:
    cluster["node-1"].jobs = [snapshot()]
    with pytest.raises(Refused, match="node-1 coordinates the snapshots of night; nothing was changed") as refused:
        leaving_node.check(asked, "node-1", force=False)
    assert "take another snapshot of each first" in refused.value.advice


def kept(job: str, coordinator: str) -> pb.KeptImage:
    return pb.KeptImage(image="m-0000000000bb", record="m-0000000000aa", job=job, coordinator_node=coordinator)


def test_jobs_whose_snapshots_a_dead_node_coordinates_are_known_from_the_nodes_with_their_images(
    cluster: FakeCluster, asked: Cluster
) -> None:
    cluster["node-2"].kept = [kept("night", "node-1"), kept("day", "node-1"), kept("noon", "node-2")]
    cluster["spare-1"].kept = [kept("night", "node-1")]
    assert leaving_node.check(asked, "node-1", force=False) == leaving_node.Needed(), "its own daemon knows better"
    cluster.stop("node-1")
    with pytest.raises(
        Refused, match="node-1 does not answer, and coordinates the snapshots of day, night; nothing"
    ) as no:
        leaving_node.check(asked, "node-1", force=False)
    assert "migrator job rollback JOB --lost node-1" in no.value.advice
    assert leaving_node.check(asked, "node-1", force=True).coordinated == ["day", "night"]
    cluster.stop("spare-1")
    with pytest.raises(Refused, match="these nodes do not answer, and may know of more: spare-1; nothing was changed"):
        leaving_node.check(asked, "node-1", force=False)


def test_nodes_that_may_know_of_more_jobs_are_named(cluster: FakeCluster, asked: Cluster) -> None:
    cluster["node-2"].jobs = [snapshot()]
    cluster["node-2"].kept = [kept("day", "node-1")]
    for node in ("node-1", "spare-1"):
        cluster.stop(node)
    needed = leaving_node.check(asked, "node-1", force=True)
    assert needed.texts == [
        "it coordinates the snapshots of these jobs, which can not be rolled back before it is in the cluster again: day",
        "it has images of these jobs, or a vote on them; take another snapshot of each now: night",
        "these nodes do not answer, and may have snapshots that need it: spare-1",
    ]
    assert leaving_node.check(asked, "spare-1", force=False).silent == ["node-1"]


def test_node_with_ranks_or_images_of_suspended_ranks_is_not_removed() -> None:
    images = [pb.Rank(job="night", memory_bytes=3 << 20), pb.Rank(job="night", memory_bytes=1 << 20)]
    with pytest.raises(Refused, match=r"images of 2 suspended ranks \(4\.2 MB; jobs: night\)") as refused:
        leaving_node.must_be_idle("node-1", pb.NodeInfo(), images)
    assert "migrator job resume" in refused.value.advice
    with pytest.raises(Refused, match="1 ranks run on node-1"):
        leaving_node.must_be_idle("node-1", pb.NodeInfo(ranks=1), [])
    leaving_node.must_be_idle("node-1", pb.NodeInfo(), [])
    leaving_node.must_be_idle("node-1", None, [])


async def test_coordinator_that_was_removed_is_asked_for_when_another_node_takes_its_job_over() -> None:
    cluster: Any = SimpleNamespace(nodes={"node-2": "10.0.0.2:7070"})
    with pytest.raises(NotFound, match="node-1 coordinated the job") as caught:
        await succession.tell_all(cluster, pb.JobRecord(record="m-1", job="night"), "node-1", "node-2", ())
    assert "enter node-1 and its address" in caught.value.advice
