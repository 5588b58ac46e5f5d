"""What a node has that is about to leave the cluster: ranks, images, and votes on snapshots of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from migrator import formatting
from snapshotd.api.errors import Refused, SnapshotError

if TYPE_CHECKING:
    from migrator.cluster import Cluster
    from migrator.jobs.finding import JobEntry
    from snapshotd.api import snapshotd_pb2 as pb


def check(cluster: Cluster, node: str, *, force: bool) -> list[str]:
    """The jobs whose last snapshot needs the node: it keeps images of it, or has a vote on it. Unless with `force`, raises
    Refused if the node's daemon says that ranks run there, or that it has images of suspended ones, or that it coordinates
    the snapshots of a job. A daemon that does not answer is no reason to keep the node."""
    cluster.enter()  # before gRPC starts threads
    from migrator.fan_out import ASK_TIMEOUT_S
    from migrator.jobs.finding import all_jobs
    from snapshotd.api import snapshotd_pb2 as pb

    async def look() -> tuple[pb.NodeInfo | None, list[pb.Rank]]:
        async with cluster.client(node) as client:
            try:
                info = await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)
                listed = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_TIMEOUT_S)
                return info, [rank for rank in listed.ranks if rank.place == pb.Rank.SUSPENDED]
            except SnapshotError:
                return None, []

    async def ask() -> tuple[pb.NodeInfo | None, list[pb.Rank], list[JobEntry]]:
        (info, images), (found, _) = await asyncio.gather(look(), all_jobs(cluster))
        return info, images, [entry for entry in found if entry.is_snapshot]

    info, images, snapshots = asyncio.run(ask())
    if not force:
        must_be_idle(node, info, images, snapshots)
    return jobs_of(node, snapshots)


def jobs_of(node: str, snapshots: Iterable[JobEntry]) -> list[str]:
    return sorted(
        {formatting.plain(entry.record.job) for entry in snapshots if node in {*entry.voters, *entry.keepers}}
    )


def must_be_idle(
    node: str, info: pb.NodeInfo | None, images: Sequence[pb.Rank], snapshots: Iterable[JobEntry] = ()
) -> None:
    if images:
        jobs = ", ".join(sorted({rank.job for rank in images}))
        size = formatting.size(sum(rank.memory_bytes for rank in images))
        raise Refused(
            f"{node} has images of {len(images)} suspended ranks ({size}; jobs: {jobs}); nothing was changed",
            remedy="resume these jobs (`migrator job resume`) or give them up (`migrator job drop`) first, or add --force:"
            " they can not be resumed any more",
        )
    if info is not None and (info.ranks or info.moves_running):
        raise Refused(
            f"{info.ranks} ranks run on {node}, and {info.moves_running} moves are in progress there; nothing was changed",
            remedy="move the ranks away first (`migrator ps`, `migrator move`), or add --force: they keep running, but can"
            " not be moved any more",
        )
    if coordinated := sorted({entry.record.job for entry in snapshots if entry.node == node}):
        raise Refused(
            f"{node} coordinates the snapshots of {', '.join(coordinated)}; nothing was changed",
            remedy="take another snapshot of each first (`migrator job snapshot`), which the node of the lowest rank"
            " coordinates, or add --force: they can not be rolled back any more when this node is gone",
        )
