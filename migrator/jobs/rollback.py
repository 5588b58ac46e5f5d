"""Rolls a job back to its last snapshot: has its incarnation ended everywhere, then resumes it from the images.

Both parts can be repeated. Once the coordinator has recorded the rollback, the job is suspended, with its snapshot as images:
whatever fails afterwards, `migrator job rollback` or `migrator job resume` tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from migrator import asked_rank
from migrator.cluster import Cluster
from migrator.driver.peers import node_addresses, node_infos
from migrator.find_rank import find_node
from migrator.image_copies import copies_of, nodes_of
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult, UnreadableImage
from migrator.jobs import homes
from migrator.jobs.finding import JobEntry, all_jobs, mine_of
from migrator.jobs.places import none_left
from migrator.jobs.resume import bring_back
from migrator.jobs.succession import take_over, tell_all
from migrator.jobs.walk import each, new_id
from migrator.results import Event
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    Ambiguous,
    NotFound,
    OutcomeUnknown,
    Refused,
    SnapshotError,
    Unreachable,
    Unreadable,
    Where,
)

ASK_S = 10.0
#: How long the nodes have to end the incarnation. One that is cut off counts after half a minute.
FENCE_S = 120.0


async def rollback(cluster: Cluster, options: JobOptions, on_event: Callable[[Event], None]) -> JobResult:
    """Rolls back a job. Raises only while nothing was decided; every later failure is in the result."""
    began = time.monotonic()
    down_since_s = began - options.down_for_s
    for node in options.lost:
        find_node(cluster, node)
    (found, _), infos = await asyncio.gather(all_jobs(cluster), node_infos(cluster))
    mine = mine_of(found, options.job, options.user_id)
    waiting = [entry for entry in mine if entry.record.kind == "rollback" and entry.suspended]
    bad: list[UnreadableImage] = []
    if waiting:
        _of_one_job([*waiting, *(entry for entry in mine if entry.is_snapshot)], options.job)
        decided, on = waiting[0], await _targets_again(cluster, waiting[0], options, infos, bad)
        if options.lost:
            request = pb.RollbackRequest(record=decided.record.record, lost_nodes=sorted(options.lost))
            async with cluster.client(decided.node) as client:
                await client.job.Rollback(request, timeout_s=60)
    else:
        decided, on = await _decide(cluster, mine, options, infos, bad, down_since_s)
    await _fenced(cluster, decided)
    resumed = await bring_back(cluster, replace(options, on=on), decided.node, decided.record, on_event, bad)
    if resumed.outcome is not JobVerdict.RESUMED:
        return resumed
    return replace(resumed, outcome=JobVerdict.ROLLED_BACK, state="", seconds=time.monotonic() - began)


@dataclass(frozen=True)
class Place:
    """A node that has the image of a rank."""

    node: str
    facts: pb.RankFacts


async def _decide(
    cluster: Cluster,
    mine: Sequence[JobEntry],
    options: JobOptions,
    infos: Mapping[str, pb.NodeInfo],
    bad: list[UnreadableImage],
    down_since_s: float,
) -> tuple[JobEntry, dict[int, str]]:
    """Has the coordinator decide the rollback. Returns its record, and the target of each rank. Adds to `bad` images that
    cannot be read."""
    snapshots = [entry for entry in mine if entry.is_snapshot]
    if not snapshots and (taken := await take_over(cluster, options)) is not None:
        snapshots = [taken]
    if not snapshots:
        raise NotFound(
            f"no node that answers keeps a snapshot of job {options.job}",
            remedy="`migrator job list` shows the snapshots. If the node that coordinates them does not answer, start it; if"
            f" it never comes back, `migrator job rollback {options.job} --lost NODE` does without it",
        )
    entry = _of_one_job(snapshots, options.job)
    former = {*options.lost, entry.record.adopted_from} & cluster.nodes.keys()  # also if it was taken over before
    for node in former - {entry.node}:
        await tell_all(cluster, entry.record, node, entry.node, options.lost)
    usable = [node for node in cluster.nodes if node in infos and node not in options.lost]
    places = await _places(cluster, entry.record, usable, bad, Where.UNTOUCHED)
    on = targets(entry.record, places, usable, options.on, cluster.labels)
    await _examine(cluster, entry.record, places, on, options.changed_files)
    await _must_have_launchers(cluster, places, infos, options)
    request = pb.RollbackRequest(
        record=new_id(),
        snapshot=entry.record.record,
        nodes=await node_addresses(cluster, infos),
        lost_nodes=sorted(options.lost),
        reason=options.reason or _asked_for(options.lost),
        down_for_s=time.monotonic() - down_since_s if options.down_for_s else 0.0,  # a take-over can take a while
    )
    async with cluster.client(entry.node) as client:
        await client.job.Rollback(request, timeout_s=60)
        listed = await client.job.List(pb.ListJobsRequest(), timeout_s=ASK_S)
    record = next(one for one in listed.jobs if one.record == request.record)
    return JobEntry(entry.node, record), on


def _asked_for(lost: Collection[str]) -> str:
    """The reason if an operator gave none."""
    return f"{', '.join(sorted(lost))} lost (declared dead)" if lost else "asked for with `migrator job rollback`"


def _of_one_job(snapshots: Sequence[JobEntry], job: str) -> JobEntry:
    """The newest one. Raises Ambiguous if they are of several jobs, which had the same name one after the other."""
    newest = snapshots[0]
    ranks = {part.rank_uid for part in newest.record.participants}
    others = [one for one in snapshots if not ranks & {part.rank_uid for part in one.record.participants}]
    if others:
        listed = ", ".join(one.record.record for one in (newest, *others))
        raise Ambiguous(
            f"several jobs that were called {job} have snapshots: {listed}",
            remedy="name one by its record; `migrator job list` shows when each was taken, and on which nodes",
        )
    return newest


async def _places(
    cluster: Cluster, record: pb.JobRecord, usable: Sequence[str], bad: list[UnreadableImage], where: Where
) -> dict[int, Place]:
    """Where the image of each rank is: on its own node, or on a buddy. Raises NotFound if one is nowhere, Unreadable if it
    cannot be read anywhere, and Refused if a node reports about another rank, and no other node has the image."""
    found: dict[int, Place] = {}
    wrong: dict[int, Refused] = {}

    async def ask(part: pb.Participant) -> None:
        for image, node in ((part.move, part.node), *((copy.move, copy.node) for copy in copies_of(part))):
            if node in usable:
                with contextlib.suppress(SnapshotError):
                    try:
                        async with cluster.client(node) as client:
                            stored = await client.source.GetImage(pb.MoveRequest(move=image), timeout_s=ASK_S)
                    except Unreadable as error:
                        bad.append(UnreadableImage(part.rank, node, image, error.message))
                        continue
                    asked = pb.Rank(uid=part.rank_uid, rank=part.rank, job=record.job, user_id=record.user_id)
                    try:
                        asked_rank.must_be(stored.facts.rank, asked, node)
                    except Refused as error:
                        wrong[part.rank] = error
                        continue
                    found[part.rank] = Place(node, stored.facts)
                    return

    await each(record.participants, ask)
    if missing := [part for part in record.participants if part.rank not in found]:
        part = missing[0]
        if part.rank in wrong:
            raise wrong[part.rank]
        if tried := [one.node for one in bad if one.rank == part.rank]:
            left = [node for node in (part.node, *nodes_of(part)) if node not in tried]
            others = [f"{node} does not answer, or does not have it any more" for node in left]
            raise none_left(record.job, part.rank, bad, others, where)
        raise NotFound(
            f"none of the nodes that kept the image of rank {part.rank} has it: {', '.join([part.node, *nodes_of(part)])}",
            remedy="if one of these nodes is only down, start it and retry; otherwise the job cannot be rolled back",
        )
    return found


def targets(
    record: pb.JobRecord,
    places: Mapping[int, Place],
    usable: Sequence[str],
    on: Mapping[int, str],
    labels: Mapping[str, Mapping[str, str]],
) -> dict[int, str]:
    """The node of each rank: the one that --on names, else its own, else a spare, else the one that has its image."""
    taken = {places[part.rank].facts.source_node for part in record.participants}
    spares = [node for node in usable if node not in taken]
    spares.sort(key=lambda node: labels.get(node, {}).get("spare", "") != "dedicated")
    chosen = {}
    for part in record.participants:
        if part.rank in on:
            chosen[part.rank] = on[part.rank]
        elif (own := places[part.rank].facts.source_node) in usable:
            chosen[part.rank] = own
        else:
            chosen[part.rank] = spares.pop(0) if spares else places[part.rank].node
    return chosen


async def _examine(
    cluster: Cluster, record: pb.JobRecord, places: Mapping[int, Place], on: Mapping[int, str], changed_files: str
) -> None:
    """Raises Refused, before anything is ended, if a target cannot take its rank."""
    refused: list[str] = []

    async def ask(part: pb.Participant) -> None:
        facts, target = places[part.rank].facts, on[part.rank]
        async with cluster.client(target) as client:
            request = pb.ExamineRequest(facts=facts, changed_files=changed_files)
            reply = await client.target.Examine(request, timeout_s=60)
        stays = target == facts.source_node
        refused.extend(
            f"  rank {part.rank} on {target}: {check.name}: {check.reason}\n    {check.remedy}"
            for check in reply.checks
            if check.verdict == pb.Check.REFUSE and not (stays and check.name == "target-node")
        )

    await each(record.participants, ask)
    if refused:
        raise Refused(f"job {record.job} cannot be rolled back:\n" + "\n".join(refused), where=Where.UNTOUCHED)


async def _must_have_launchers(
    cluster: Cluster, places: Mapping[int, Place], infos: Mapping[str, pb.NodeInfo], options: JobOptions
) -> None:
    """Raises Refused if the launcher of a rank has ended by itself: then nothing waits for the job any more."""
    ranks = {number: place.facts.rank for number, place in sorted(places.items())}
    kept, silent = await homes.kept_on(cluster, (rank.home_node for rank in ranks.values()))
    lost = {rank.home_node for rank in ranks.values() if homes.was_rebooted(rank, infos)} | options.lost
    found = [(number, homes.check_after_loss(rank, kept, silent, lost)) for number, rank in ranks.items()]
    refused = [
        f"  rank {number}: {one.reason}\n    {one.remedy}" for number, one in found if one.verdict == pb.Check.REFUSE
    ]
    if refused:
        raise Refused(f"job {options.job} cannot be rolled back:\n" + "\n".join(refused), where=Where.UNTOUCHED)


async def _targets_again(
    cluster: Cluster,
    entry: JobEntry,
    options: JobOptions,
    infos: Mapping[str, pb.NodeInfo],
    bad: list[UnreadableImage],
) -> dict[int, str]:
    """A rollback that was decided before is resumed: on the nodes that answer."""
    usable = [node for node in cluster.nodes if node in infos and node not in options.lost]
    places = await _places(cluster, entry.record, usable, bad, Where.SUSPENDED)
    return targets(entry.record, places, usable, options.on, cluster.labels)


async def _fenced(cluster: Cluster, entry: JobEntry) -> None:
    """Waits until no process of the former incarnation runs."""
    ends, waiting = time.monotonic() + FENCE_S, ""
    while time.monotonic() < ends:
        with contextlib.suppress(SnapshotError):
            async with cluster.client(entry.node) as client:
                listed = await client.job.List(pb.ListJobsRequest(), timeout_s=ASK_S)
            record = next((one for one in listed.jobs if one.record == entry.record.record), None)
            if record is None:
                raise Unreachable(f"{entry.node} has lost the record of the rollback", where=Where.SUSPENDED)
            if record.ended_unix_s:
                return
            waiting = record.waiting_for
        await asyncio.sleep(0.1)
    raise OutcomeUnknown(
        f"the rollback of job {entry.record.job} is decided, and waits: {waiting}",
        remedy="start the daemon of that node, or declare the node dead: `migrator job rollback --lost NODE`; then repeat it",
        where=Where.SUSPENDED,
    )
