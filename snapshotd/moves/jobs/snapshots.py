"""Whether the job of a snapshot has ended, so that its images are not needed any more.

Invariant: a node that does not answer may have ranks of the job, unless an operator has declared it dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Where, WrongState
from snapshotd.moves.jobs import records
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import ClusterNode
from snapshotd.runtime.blocking import in_thread

ASK_S = 5.0


async def why_needed(node: Node, snapshot: MoveLog, lost_nodes: Collection[str] = ()) -> str:
    """Why a complete snapshot must be kept; empty: its job has ended."""
    uids = await in_thread(records.uids, snapshot)
    if before := await in_thread(records.rolled_back, node.journal, uids):
        return f"the job was rolled back to it and waits to be resumed ({before.move})"
    asked = [one for one in (await in_thread(snapshot.whole)).nodes if one.name not in lost_nodes]
    answers = await asyncio.gather(*(_knows_none_of(node, one, uids) for one in asked))
    return "; ".join(filter(None, answers))


async def _knows_none_of(node: Node, other: ClusterNode, uids: Collection[str]) -> str:
    try:
        async with node.client(other.name, other.endpoint) as client:
            reply = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_S)
    except SnapshotError as error:
        return f"{other.name} does not say whether it has ranks of the job: {error.headline}"
    found = [rank.rank for rank in reply.ranks if rank.uid in uids]
    return f"{other.name} knows rank {found[0]} of the job" if found else ""


async def must_have_ended(node: Node, snapshot: MoveLog, lost_nodes: Collection[str]) -> None:
    """Raises WrongState while the snapshot is needed."""
    if not snapshot.committed or not snapshot.ended_unix_s:
        raise WrongState(f"snapshot {snapshot.move} is not complete", where=Where.UNTOUCHED)
    if why := await why_needed(node, snapshot, lost_nodes):
        raise WrongState(
            f"snapshot {snapshot.move} of job {snapshot.begin.job} is needed: {why}",
            remedy="end the launchers of the job; a node that never comes back is declared dead with --lost NODE",
            where=Where.UNTOUCHED,
        )
