"""Gives the snapshots of a job another coordinator: `snapshotd/moves/jobs/succession.py` explains it.

A coordinator that is lost has left no record, but its snapshot's images say enough to make it again. Whether another node may
coordinate the job, the nodes decide: a majority of them must agree, or an operator declares the lost one dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from migrator.cluster import Cluster
from migrator.driver.peers import node_addresses, node_infos
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from migrator.image_copies import copies_of, set_copies
from migrator.job_results import JobOptions
from migrator.jobs.finding import JobEntry
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import NotFound, Refused, SnapshotError, Unreachable, Where

Kept = tuple[str, pb.KeptImage]  # the node, and one of its images


async def hand_over(cluster: Cluster, entry: JobEntry, successor: str) -> JobEntry:
    """Makes another node the coordinator of a job's snapshot. Can be repeated. Raises if not every node was told."""
    record = entry.record
    async with cluster.client(entry.node) as client:
        request = pb.HandOverRequest(record=record.record, successor=successor)
        await client.job.HandOver(request, timeout_s=ASK_TIMEOUT_S)
    adopted = await _adopt(cluster, record, record.participants, entry.node, successor, ())
    silent = await tell_all(cluster, adopted.record, entry.node, successor, ())
    if silent:
        lost = "".join(f"\n  {error.headline}" for error in silent.values())
        raise Unreachable(
            f"{successor} coordinates job {record.job} now, but these nodes do not know it yet:{lost}",
            remedy="start snapshotd there, then retry; until then the former coordinator must not be switched off",
            where=Where.UNTOUCHED,
        )
    return adopted


async def take_over(cluster: Cluster, options: JobOptions) -> JobEntry | None:
    """Makes the record of a job's snapshot again, on another node, if its coordinator does not answer, or is one of those
    that the operator declares dead. None: no node keeps images of such a snapshot. Raises if too few nodes agree."""
    answers, _ = await all_kept(cluster, [node for node in cluster.nodes if node not in options.lost])
    found = [(node, image) for node, images in answers.items() for image in images]
    mine = [one for one in found if one[1].job == options.job and options.user_id in (None, one[1].user_id)]
    lost = [one for one in mine if one[1].coordinator_node not in answers]
    if not lost:
        return None
    declared = [one for one in lost if one[1].coordinator_node in options.lost]
    chosen = newest_whole(declared or _confirmed(lost))
    former = chosen[0][1].coordinator_node
    parts = participants(chosen, cluster.nodes)
    image = chosen[0][1]
    record = pb.JobRecord(record=image.record, job=image.job, user_id=image.user_id, kind="snapshot", outcome=pb.COMMIT)
    # What one node claims must not have all later snapshots refused.
    record.copies = min(max(one.copies for _, one in chosen), len(cluster.nodes) - 1)
    return await _adopt(cluster, record, parts, former, parts[0].node, options.lost)


async def all_kept(
    cluster: Cluster, nodes: Iterable[str]
) -> tuple[dict[str, list[pb.KeptImage]], dict[str, SnapshotError]]:
    """The images of snapshots that these nodes keep, by node, and the nodes that did not answer."""

    async def ask(client: DaemonClient) -> list[pb.KeptImage]:
        try:
            return list((await client.job.ListKept(pb.ListKeptRequest(), timeout_s=ASK_TIMEOUT_S)).images)
        except UnknownMethod:  # an older daemon keeps none
            return []

    return await ask_all(cluster, ask, nodes)


def _confirmed(images: Sequence[Kept]) -> list[Kept]:
    """Those of snapshots of which a node knows that all have confirmed them: no rank runs that knows no coordinator."""
    records = {image.record for _, image in images if image.settled}
    return [one for one in images if one[1].record in records] or list(images)


def newest_whole(images: Sequence[Kept]) -> list[Kept]:
    """The images of the newest snapshot of which every rank has one. Raises NotFound."""
    ranks = {image.rank for _, image in images}
    by_record: dict[str, list[Kept]] = {}
    for one in images:
        by_record.setdefault(one[1].record, []).append(one)
    whole = [mine for mine in by_record.values() if {image.rank for _, image in mine} == set(range(max(ranks) + 1))]
    if not whole:
        missing = sorted(set(range(max(ranks) + 1)) - ranks)
        raise NotFound(
            f"no snapshot is left of which every rank has an image{f' (rank {missing[0]} has none)' if missing else ''}",
            remedy="if a node that has such images is only down, start it and retry; otherwise start the job again",
        )
    return max(whole, key=lambda mine: max(image.begun_unix_s for _, image in mine))


def participants(images: Sequence[Kept], endpoints: Mapping[str, str]) -> list[pb.Participant]:
    """The ranks of a snapshot, with what is left of their images and copies. The first of them counts as the image."""
    found: dict[int, pb.Participant] = {}
    for node, image in sorted(images, key=lambda one: one[1].is_copy):
        part = found.get(image.rank)
        if part is None:
            found[image.rank] = pb.Participant(
                rank_uid=image.rank_uid,
                rank=image.rank,
                move=image.image,
                node=node,
                endpoint=endpoints[node],
                incarnation=image.incarnation,
                made_on=image.made_on,
            )
        elif part.rank_uid != image.rank_uid:
            raise Refused(
                f"{part.node} and {node} name different processes as rank {image.rank} of job {image.job} in {image.record}:"
                f" {part.rank_uid} and {image.rank_uid}",
                remedy="find out which of them is right; do not trust the other node, and declare it dead with --lost",
                where=Where.UNTOUCHED,
            )
        elif part.made_on and image.made_on and part.made_on != image.made_on:
            raise Refused(
                f"{part.node} and {node} do not agree on the node that has made the image of rank {image.rank} of job"
                f" {image.job} in {image.record}: {part.made_on!r} and {image.made_on!r}",
                remedy="find out which of them is right; do not trust the other node, and declare it dead with --lost",
                where=Where.UNTOUCHED,
            )
        else:
            part.made_on = part.made_on or image.made_on
            copy = pb.ImageCopy(move=image.image, node=node, endpoint=endpoints[node])
            set_copies(part, [*copies_of(part), copy])
    return [found[rank] for rank in sorted(found)]


def _endpoint(cluster: Cluster, former: str) -> str:
    """The nodes ask the former coordinator whether it is there."""
    if former not in cluster.nodes:
        raise NotFound(
            f"{former} coordinated the job, and the cluster file does not have it any more",
            remedy=f"enter {former} and its address in that file again until the job is rolled back, also if it is off",
        )
    return cluster.nodes[former]


async def _adopt(
    cluster: Cluster,
    record: pb.JobRecord,
    parts: Sequence[pb.Participant],
    former: str,
    successor: str,
    lost: Collection[str],
) -> JobEntry:
    request = pb.AdoptRequest(
        record=record.record,
        job=record.job,
        user_id=record.user_id,
        participants=parts,
        nodes=await node_addresses(cluster, await node_infos(cluster)),
        former=former,
        former_endpoint=_endpoint(cluster, former),
        lost_nodes=sorted(lost),
        quorums=record.quorums,
        copies=record.copies,
    )
    async with cluster.client(successor) as client:
        await client.job.Adopt(request, timeout_s=60)
        listed = await client.job.List(pb.ListJobsRequest(), timeout_s=ASK_TIMEOUT_S)
    return JobEntry(successor, next(one for one in listed.jobs if one.record == record.record))


async def tell_all(
    cluster: Cluster, record: pb.JobRecord, former: str, successor: str, lost: Collection[str]
) -> dict[str, SnapshotError]:
    """Has every node obey the successor. Returns the nodes that did not answer. Nodes to which the former coordinator means
    nothing do nothing. Raises if one refuses, because the former coordinator is there."""
    request = pb.SucceedRequest(
        record=record.record,
        former=former,
        former_endpoint=_endpoint(cluster, former),
        successor=successor,
        successor_endpoint=cluster.nodes[successor],
        rank_uids=[part.rank_uid for part in record.participants],
    )

    async def ask(client: DaemonClient) -> pb.SucceedReply:
        return await client.job.Succeed(request, timeout_s=60)

    _, failed = await ask_all(cluster, ask, [node for node in cluster.nodes if node not in lost])
    for error in failed.values():
        if not isinstance(error, Unreachable):
            raise error
    return failed
