"""Compares the rank that a node reports about with the one that it was asked about.

What a driver learns from one node it tells to others: the job and the user in these facts decide which images a target
searches for equal blocks, and as which user a rank is restored. So no node may give its rank the name of another one.
"""

from __future__ import annotations

from migrator import users
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, Where


def must_be(reported: pb.Rank, asked: pb.Rank, node: str) -> None:
    """Raises Refused, with both, unless what `node` reports is the rank with this uid, number, job and user."""
    if _name(reported) == _name(asked):
        return
    raise Refused(
        f"{node} was asked about {_described(asked)}, and reports about {_described(reported)}",
        remedy=f"a daemon does not do that: find out what runs on {node}, and do not trust it until then (SECURITY.md)",
        where=Where.UNTOUCHED,
    )


def _name(rank: pb.Rank) -> tuple[str, int, str, int]:
    return rank.uid, rank.rank, rank.job, rank.user_id


def _described(rank: pb.Rank) -> str:
    return f"rank {rank.rank} of job {rank.job[:80]} of {users.described(rank.user_id)} ({rank.uid[:80]})"
