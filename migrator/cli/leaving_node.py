"""What a node has that is about to leave the cluster: ranks, images, and votes on snapshots of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from migrator import formatting
from snapshotd.api.errors import Refused, SnapshotError

if TYPE_CHECKING:
    from migrator.cluster import Cluster
    from migrator.jobs.finding import JobEntry
    from snapshotd.api import snapshotd_pb2 as pb


@dataclass(frozen=True)
class Needed:
    """What needs a node, as far as the nodes that answer know."""

    jobs: list[str] = field(default_factory=list)  # whose last snapshot has images there, or gives it a vote
    coordinated: list[str] = field(default_factory=list)  # whose snapshots it coordinates
    silent: list[str] = field(default_factory=list)  # other nodes, which may know more

    @property
    def texts(self) -> list[str]:
        """What the operator is told of a node that is removed all the same."""
        found = []
        if self.coordinated:
            found.append(
                "it coordinates the snapshots of these jobs, which can not be rolled back before it is in the cluster again:"
                f" {', '.join(self.coordinated)}"
            )
        if others := [job for job in self.jobs if job not in self.coordinated]:
            found.append(
                f"it has images of these jobs, or a vote on them; take another snapshot of each now: {', '.join(others)}"
            )
        if self.silent:
            found.append(f"these nodes do not answer, and may have snapshots that need it: {', '.join(self.silent)}")
        return found


def check(cluster: Cluster, node: str, *, force: bool) -> Needed:
    """What needs the node. Unless with `force`, raises Refused if the node's daemon says that ranks run there, or that it has
    images of suspended ones, or if it coordinates the snapshots of a job. If its daemon does not answer, the nodes that keep
    the images of these snapshots say so. Otherwise such a daemon is no reason to keep the node."""
    cluster.enter()  # before gRPC starts threads
    from migrator.fan_out import ASK_TIMEOUT_S
    from migrator.jobs.finding import all_jobs
    from migrator.jobs.succession import all_kept
    from snapshotd.api import snapshotd_pb2 as pb

    async def look() -> tuple[pb.NodeInfo | None, list[pb.Rank]]:
        async with cluster.client(node) as client:
            try:
                info = await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)
                listed = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_TIMEOUT_S)
                return info, [rank for rank in listed.ranks if rank.place == pb.Rank.SUSPENDED]
            except SnapshotError:
                return None, []

    async def ask() -> tuple[pb.NodeInfo | None, list[pb.Rank], Needed]:
        others = [name for name in cluster.nodes if name != node]
        (info, images), (found, silent), (kept, mute) = await asyncio.gather(
            look(), all_jobs(cluster), all_kept(cluster, others)
        )
        snapshots = [entry for entry in found if entry.is_snapshot]
        coordinated = {entry.record.job for entry in snapshots if entry.node == node}
        if node in silent:
            coordinated |= {image.job for mine in kept.values() for image in mine if image.coordinator_node == node}
        return (
            info,
            images,
            Needed(
                jobs=jobs_of(node, snapshots),
                coordinated=sorted(map(formatting.plain, coordinated)),
                silent=[name for name in others if name in silent or name in mute],
            ),
        )

    info, images, needed = asyncio.run(ask())
    if not force:
        must_be_idle(node, info, images, needed)
    return needed


def jobs_of(node: str, snapshots: Iterable[JobEntry]) -> list[str]:
    return sorted(
        {formatting.plain(entry.record.job) for entry in snapshots if node in {*entry.voters, *entry.keepers}}
    )


def must_be_idle(node: str, info: pb.NodeInfo | None, images: Sequence[pb.Rank], needed: Needed | None = None) -> None:
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
    if needed is None or not needed.coordinated:
        return
    coordinated, silent = ", ".join(needed.coordinated), ", ".join(needed.silent)
    unknown = f"; these nodes do not answer, and may know of more: {silent}" if silent else ""
    if info is None:
        raise Refused(
            f"{node} does not answer, and coordinates the snapshots of {coordinated}{unknown}; nothing was changed",
            remedy=f"start it, or roll each job back without it first (`migrator job rollback JOB --lost {node}`), or add"
            " --force: they can not be rolled back then before the cluster file has the node again",
        )
    raise Refused(
        f"{node} coordinates the snapshots of {coordinated}{unknown}; nothing was changed",
        remedy="take another snapshot of each first (`migrator job snapshot`), which the node of the lowest rank"
        " coordinates, or add --force: they can not be rolled back any more when this node is gone",
    )
