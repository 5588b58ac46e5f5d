"""Finds the ranks of a running job, and suspended jobs, by asking all nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from migrator import users
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from migrator.find_rank import Found, all_ranks, refuse_busy
from migrator.image_copies import nodes_of
from migrator.job_results import JobOptions
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import Ambiguous, NotFound, Refused, SnapshotError, Unreachable, Where, WrongState


@dataclass(frozen=True)
class JobEntry:
    """A record, and the node that keeps it."""

    node: str
    record: pb.JobRecord

    @property
    def suspended(self) -> bool:
        record = self.record
        return (
            record.kind != "snapshot" and not record.suspension and record.outcome == pb.COMMIT and not record.ended_by
        )

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a complete snapshot that was not given up, and its coordinator may decide."""
        record = self.record
        counts = record.outcome == pb.COMMIT and not record.ended_by and not record.handed_to and not record.cut_off
        return record.kind == "snapshot" and counts

    @property
    def keepers(self) -> list[str]:
        """The nodes that keep its images, in the order of the ranks."""
        nodes = [(part.image_node or part.node, *nodes_of(part)) for part in self.record.participants]
        return list(dict.fromkeys(node for of_rank in nodes for node in of_rank))

    @property
    def voters(self) -> list[str]:
        """Of a snapshot: the nodes of which most must follow its coordinator."""
        return sorted({node for voters in self.record.quorums for node in voters.nodes})

    @property
    def witnesses(self) -> list[str]:
        """Of these, the nodes that keep no image. Records that have ended do not say which do."""
        known = {self.node, *self.keepers} if self.record.participants else set(self.voters)
        return [node for node in self.voters if node not in known]


async def find_running(
    cluster: Cluster, job: str, user_id: int | None, *, hurries: bool = False
) -> tuple[list[Found], list[str]]:
    """All ranks of a job, by their numbers, and warnings. Raises unless each of them runs on a node that answers.
    `hurries`: if a snapshot is being copied, that is to end soon.

    A node that does not answer and seems to have no rank of the job does not matter: no number is missing. A rank there that
    others are connected with is noticed later, because its end of the connections is."""
    found, silent = await all_ranks(cluster)
    mine = [entry for entry in found if entry.rank.job == job and user_id in (None, entry.rank.user_id)]
    owners = sorted({entry.rank.user_id for entry in mine})
    if len(owners) > 1:
        raise Ambiguous(
            f"several users have a job {job}: {', '.join(map(users.described, owners))}",
            remedy="select its user with --user",
        )
    if below := [entry for entry in mine if entry.rank.rank < 0]:  # the node of the lowest one coordinates the job
        raise Refused(
            f"{below[0].node} says that it has rank {below[0].rank.rank} of job {job}: no rank is started with such a number",
            remedy="stop the daemon of that node; do not trust it",
            where=Where.UNTOUCHED,
        )
    running = [entry for entry in mine if entry.rank.place == pb.Rank.HERE]
    here = {entry.rank.uid: entry for entry in running}
    numbers = sorted({entry.rank.rank for entry in mine})
    lost = "".join(f"\n  {error.headline}" for error in silent.values())
    if silent and numbers != list(range(len(numbers))):
        raise Unreachable(
            f"ranks of job {job} are missing, and these nodes do not answer:{lost}", where=Where.UNTOUCHED
        )
    if silent and not mine:
        raise Unreachable(f"no node that answers has ranks of job {job}, and these do not:{lost}")
    if not mine:
        raise NotFound(f"no job {job} runs on any node", remedy="`migrator ps` lists the ranks of all jobs")
    if any(entry.rank.place == pb.Rank.SUSPENDED and entry.rank.uid not in here for entry in mine):
        raise WrongState(
            f"job {job} is suspended already, at least in part",
            remedy=f"`migrator job list` shows it; `migrator job resume {job}` brings it back",
            where=Where.SUSPENDED,
        )
    if gone := [entry for entry in mine if entry.rank.uid not in here]:
        raise Unreachable(
            f"rank {gone[0].rank.rank} of job {job} should be on {gone[0].rank.at_node}, which does not have it",
            where=Where.UNKNOWN,
        )
    if moving := [entry for entry in running if entry.rank.moving]:
        why = f"rank {moving[0].rank.rank} is being moved ({moving[0].rank.moving})"
        await refuse_busy(cluster, moving, why, hurries=hurries)
    if claimed := [entry for entry in running if here[entry.rank.uid] is not entry]:
        uid = claimed[0].rank.uid
        raise Ambiguous(
            f"{claimed[0].node} and {here[uid].node} both say that they have rank {claimed[0].rank.rank} of job {job},"
            f" and only one can ({uid})",
            remedy="find out which of them has it, and stop the daemon of the other one; do not trust that node",
        )
    ranks = sorted(here.values(), key=lambda entry: entry.rank.rank)
    numbers = [entry.rank.rank for entry in ranks]
    if twice := {number for number in numbers if numbers.count(number) > 1}:
        raise Ambiguous(
            f"rank {min(twice)} of job {job} was started more than once",
            remedy="give jobs that run at the same time different names (`migrator run --job NAME`)",
        )
    warning = f"{', '.join(silent)} did not answer: if ranks of the job are there, they are not suspended"
    return ranks, [warning] if silent else []


def must_be_same(options: JobOptions, found: Sequence[Found]) -> None:
    """Raises WrongState if the job with this name has other ranks than the one that was meant. Later than this it cannot be
    another one: every daemon is asked about a rank by its uid."""
    uids = {one.rank.uid for one in found}
    if options.uids and uids != options.uids:
        other = min(uids ^ options.uids)
        raise WrongState(
            f"job {options.job} is not the one that was meant: it has {len(uids)} ranks, and {other} is not in both",
            remedy="a job of this name was started again in the meantime; look at it with `migrator ps`, then decide anew",
            where=Where.UNTOUCHED,
        )


async def all_jobs(cluster: Cluster) -> tuple[list[JobEntry], dict[str, SnapshotError]]:
    """Every record that any node keeps, the newest first, and the nodes that did not answer."""

    async def ask(client: DaemonClient) -> pb.ListJobsReply:
        try:
            return await client.job.List(pb.ListJobsRequest(), timeout_s=ASK_TIMEOUT_S)
        except UnknownMethod:  # an older daemon has no such records
            return pb.ListJobsReply()

    answers, silent = await ask_all(cluster, ask)
    found = [JobEntry(node, record) for node, reply in answers.items() for record in reply.jobs]
    return sorted(found, key=lambda entry: entry.record.begun_unix_s, reverse=True), silent


async def image_sizes(cluster: Cluster) -> dict[tuple[str, str], int]:
    """The bytes of the images of suspended ranks, by node and uid of the rank, as far as nodes answer."""

    async def ask(client: DaemonClient) -> pb.ListRanksReply:
        return await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_TIMEOUT_S)

    answers, _ = await ask_all(cluster, ask)
    return {
        (node, rank.uid): rank.memory_bytes
        for node, reply in answers.items()
        for rank in reply.ranks
        if rank.place == pb.Rank.SUSPENDED
    }


async def snapshot_of(cluster: Cluster, uids: Collection[str]) -> JobEntry | None:
    """The newest snapshot of the job with these ranks, and the node that coordinates it."""
    found, _ = await all_jobs(cluster)
    mine = [one for one in found if one.is_snapshot and any(part.rank_uid in uids for part in one.record.participants)]
    return mine[0] if mine else None


def mine_of(found: Iterable[JobEntry], job: str, user_id: int | None) -> list[JobEntry]:
    """The records of one job, which is named, or by the id of one of its records. Raises Ambiguous."""
    entries = list(found)
    named = [one for one in entries if job in (one.record.job, one.record.record)]
    mine = [one for one in named if user_id in (None, one.record.user_id)]
    owners = sorted({one.record.user_id for one in mine})
    if len(owners) > 1:
        raise Ambiguous(
            f"several users have a job {job}: {', '.join(map(users.described, owners))}",
            remedy="select its user with --user",
        )
    return mine


async def find_suspended(cluster: Cluster, job: str, user_id: int | None) -> tuple[str, pb.JobRecord]:
    """The record of a suspended job, and its coordinator. `job` is its name, or the id of the record."""
    found, silent = await all_jobs(cluster)
    mine = _named(found, job, user_id)
    suspended = [entry for entry in mine if entry.suspended]
    if suspended:
        return _the_only(suspended, job)
    if silent:
        lost = "".join(f"\n  {error.headline}" for error in silent.values())
        raise Unreachable(f"no node that answers knows a suspended job {job}, and these do not:{lost}")
    raise NotFound(f"no job {job} is suspended", remedy="`migrator job list` shows suspended jobs")


async def find_droppable(
    cluster: Cluster, job: str, user_id: int | None, lost: Collection[str] = ()
) -> tuple[str, pb.JobRecord]:
    """The record of a job whose images can be dropped, and its coordinator: a suspended one; if there is none, one whose
    images were to be dropped and are not yet, because a node did not answer, or a target has forgotten its part; else one
    that has a snapshot. `lost`: nodes that the operator declares dead."""
    found, silent = await all_jobs(cluster)
    silent = {node: error for node, error in silent.items() if node not in lost}
    mine = _named(found, job, user_id)
    if silent and not any(entry.record.record == job for entry in mine):
        lost = "".join(f"\n  {error.headline}" for error in silent.values())
        raise Unreachable(
            f"these nodes do not answer, and may know another suspended job {job}:{lost}",
            remedy="start snapshotd there, or name the job by its record, which `migrator job list` shows",
        )
    unfinished = {entry.record.record for entry in found if not entry.record.ended_unix_s}
    suspended = [entry for entry in mine if entry.suspended]
    left = [entry for entry in mine if not entry.record.suspension and _is_left(entry.record, unfinished)]
    snapshots = [entry for entry in mine if entry.is_snapshot]
    if suspended or left or snapshots:
        return _the_only(suspended or left or snapshots, job)
    raise NotFound(f"no job {job} is suspended", remedy="`migrator job list` shows suspended jobs")


def _is_left(record: pb.JobRecord, unfinished: Collection[str]) -> bool:
    """Whether a suspension that has ended may have left images."""
    if record.outcome != pb.COMMIT:
        return False
    return not record.ended_unix_s if record.ended_by.startswith("dropped") else record.ended_by in unfinished


def _named(found: Sequence[JobEntry], job: str, user_id: int | None) -> list[JobEntry]:
    named = [entry for entry in found if job in (entry.record.job, entry.record.record)]
    return [entry for entry in named if user_id in (None, entry.record.user_id)]


def _the_only(found: Sequence[JobEntry], job: str) -> tuple[str, pb.JobRecord]:
    if len(found) > 1:
        listed = ", ".join(f"{entry.record.record} of {users.described(entry.record.user_id)}" for entry in found)
        raise Ambiguous(
            f"several suspended jobs are called {job}: {listed}", remedy="name one by its record, or give --user"
        )
    return found[0].node, found[0].record
