"""Finds the node that has a rank, by asking all nodes concurrently."""

from __future__ import annotations

import asyncio
import difflib
from dataclasses import dataclass

from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, Busy, NotFound, SnapshotError, Unreachable, Where

ASK_TIMEOUT_S = 5.0


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


async def all_ranks(cluster: Cluster) -> tuple[list[Found], dict[str, SnapshotError]]:
    """Every rank on every node that answers, and the error of every node that does not."""

    async def ask(node: str) -> list[Found]:
        async with cluster.client(node) as client:
            reply = await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=ASK_TIMEOUT_S)
            return [Found(node, rank) for rank in reply.ranks]

    answers = await asyncio.gather(*(ask(node) for node in cluster.nodes), return_exceptions=True)
    found: list[Found] = []
    silent: dict[str, SnapshotError] = {}
    for node, answer in zip(cluster.nodes, answers, strict=True):
        if isinstance(answer, SnapshotError):
            silent[node] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += answer
    return found, silent


async def find_rank(cluster: Cluster, rank: int, job: str | None) -> Found:
    """The only process that is rank `rank`. Raises NotFound, Ambiguous, Busy or Unreachable; changes nothing."""
    found, silent = await all_ranks(cluster)
    meant = [entry for entry in found if entry.rank.rank == rank and job in (None, entry.rank.job)]
    here = [entry for entry in meant if entry.rank.place == pb.Rank.HERE]
    jobs = sorted({entry.rank.job for entry in meant})
    if len(jobs) > 1:
        raise Ambiguous(f"several jobs have a rank {rank}: {', '.join(jobs)}")
    if not here:
        away = [entry.rank.at_node for entry in meant if entry.rank.at_node in silent]
        if away or silent:
            lost = "".join(f"\n  {silent[node].headline}" for node in away or silent)
            raise Unreachable(f"rank {rank} is on no node that answers, and these do not:{lost}", where=Where.UNKNOWN)
        of_job = f" in job {job!r}" if job else ""
        raise NotFound(f"no rank {rank}{of_job} runs on any node")
    if moving := [entry.rank.moving for entry in here if entry.rank.moving]:
        raise Busy(f"rank {rank} is being moved already ({moving[0]})", where=Where.UNKNOWN)
    if len(here) > 1:
        on = ", ".join(f"{entry.node} ({entry.rank.uid})" for entry in here)
        raise Ambiguous(f"rank {rank} of job {jobs[0]} was started more than once: {on}", remedy="end one of them")
    return here[0]
