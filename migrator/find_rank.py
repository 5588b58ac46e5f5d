"""Finds the node that has a rank, by asking all nodes concurrently."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from migrator import users
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, note
from migrator.hurry import hurry
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, Busy, NotFound, SnapshotError, Unreachable, Where, WrongState

if TYPE_CHECKING:
    from snapshotd.api.client import DaemonClient


@dataclass(frozen=True)
class Found:
    """A rank and the node that has its process."""

    node: str
    rank: pb.Rank


def find_node(cluster: Cluster, name: str) -> str:
    """The node's endpoint. Raises NotFound with the nearest name."""
    if name in cluster.nodes:
        return cluster.nodes[name]
    near = difflib.get_close_matches(name, cluster.nodes, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise NotFound(f"no node is called {name!r}{hint}", remedy=f"the nodes are: {', '.join(sorted(cluster.nodes))}")


async def all_ranks(
    cluster: Cluster, nodes: Iterable[str] | None = None, clients: Mapping[str, DaemonClient] | None = None
) -> tuple[list[Found], dict[str, SnapshotError]]:
    """Every rank on every node (or on these) that answers, and the error of every node that does not. `clients`: connections
    to nodes that the caller has open; these nodes are asked."""
    asked = list(clients if clients is not None else cluster.nodes if nodes is None else nodes)

    async def ask(node: str) -> list[Found]:
        if clients is not None:
            return await list_ranks(clients[node], node)
        async with cluster.client(node) as client:
            return await list_ranks(client, node)

    async def list_ranks(client: DaemonClient, node: str) -> list[Found]:
        reply = await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=ASK_TIMEOUT_S)
        return [Found(node, rank) for rank in reply.ranks]

    answers = await asyncio.gather(*map(ask, asked), return_exceptions=True)
    found: list[Found] = []
    silent: dict[str, SnapshotError] = {}
    for node, answer in zip(asked, answers, strict=True):
        if isinstance(answer, SnapshotError):
            note(cluster, node, answer)
            silent[node] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            note(cluster, node, None)
            found += answer
    return found, silent


async def find_rank(
    cluster: Cluster,
    rank: int | str,
    job: str | None,
    user_id: int | None = None,
    source: str = "",
    *,
    hurries: bool = False,
) -> Found:
    """The only process that is rank `rank`, which is a number or the id of a rank. Raises NotFound, Ambiguous, Busy or
    Unreachable; changes nothing.

    A job is named by its user and its name, so that a user who gives a job the name of another's cannot make it immovable.
    With `hurries`, a copy of its snapshot that keeps it from moving is sent without a limit from now on.
    With `source`, only that node is asked: another one that claims the rank, truthfully or not, changes nothing.
    """
    if source:
        find_node(cluster, source)
    found, silent = await all_ranks(cluster, (source,) if source else cluster.nodes)
    meant = [
        entry
        for entry in found
        if rank in (entry.rank.rank, entry.rank.uid)
        and job in (None, entry.rank.job)
        and user_id in (None, entry.rank.user_id)
    ]
    here = [entry for entry in meant if entry.rank.place == pb.Rank.HERE]
    jobs = sorted({(entry.rank.job, entry.rank.user_id) for entry in meant})
    if len(jobs) > 1:
        raise _ambiguous(rank, jobs)
    if not here:
        away = [entry.rank.at_node for entry in meant if entry.rank.at_node in silent]
        if away or silent:
            lost = "".join(f"\n  {silent[node].headline}" for node in away or silent)
            raise Unreachable(f"rank {rank} is on no node that answers, and these do not:{lost}", where=Where.UNKNOWN)
        if suspended := [entry.rank.job for entry in meant if entry.rank.place == pb.Rank.SUSPENDED]:
            raise WrongState(
                f"rank {rank} of job {suspended[0]} is suspended",
                remedy=f"`migrator job resume {suspended[0]} --on {rank}=NODE` resumes the job, with this rank on NODE",
                where=Where.SUSPENDED,
            )
        of_job = f" in job {job!r}" if job else ""
        of_user = f" of user {users.described(user_id)}" if user_id is not None else ""
        raise NotFound(f"no rank {rank}{of_job}{of_user} runs on {source or 'any node'}")
    if moving := [entry for entry in here if entry.rank.moving]:
        await refuse_busy(
            cluster, moving, f"rank {rank} is being moved already ({moving[0].rank.moving})", hurries=hurries
        )
    if len(here) > 1:
        on = ", ".join(f"{entry.node} ({entry.rank.uid})" for entry in here)
        if len({entry.rank.uid for entry in here}) == 1:
            raise Ambiguous(
                f"several nodes say that they have rank {rank} of job {jobs[0][0]}, and only one can: {on}",
                remedy=f"find out which one has it, and name it: --from {here[0].node}; do not trust the other one",
            )
        raise Ambiguous(
            f"rank {rank} of job {jobs[0][0]} was started more than once: {on}",
            remedy=f"name one by its id: --rank {here[0].rank.uid}",
        )
    return here[0]


async def refuse_busy(cluster: Cluster, moving: Sequence[Found], why: str, *, hurries: bool) -> NoReturn:
    """Raises Busy. `hurries`: if a snapshot of one of the ranks is only being copied, that is to end soon."""
    if hurries and await hurry(cluster, [(one.node, one.rank.moving) for one in moving]):
        raise Busy(
            f"{why}: a copy of its snapshot is being sent",
            remedy="retry in a moment; the copy is sent without `copy_limit` now",
            where=Where.SOURCE_RUNNING,
        )
    raise Busy(why, where=Where.UNKNOWN)


def _ambiguous(rank: int | str, jobs: list[tuple[str, int]]) -> Ambiguous:
    """`jobs`: name and user of every job that has such a rank."""
    owners = {user_id for _, user_id in jobs}
    if len(owners) == 1:
        return Ambiguous(
            f"several jobs have a rank {rank}: {', '.join(job for job, _ in jobs)}", remedy="select the job with --job"
        )
    named = ", ".join(f"{job} of {users.described(user_id)}" for job, user_id in jobs)
    option = "its user with --user" if len({job for job, _ in jobs}) == 1 else "the job with --job and --user"
    return Ambiguous(f"several users have a rank {rank}: {named}", remedy=f"select {option}")
