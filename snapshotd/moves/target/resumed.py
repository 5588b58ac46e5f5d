"""The part of a target in resuming a whole job: plans the addresses of its rank, and asks the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Refused, SnapshotError, Unreachable, Usage, Where, WrongState
from snapshotd.moves import kept_files
from snapshotd.moves.changed_file import Policy
from snapshotd.moves.journal import check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.connections import NAME_THE_NETWORK
from snapshotd.moves.record_parts import ClusterNode
from snapshotd.net import rejoin
from snapshotd.runtime.blocking import in_thread, waiting_for_disk

ASK_S = 10.0


@asynccontextmanager
async def room(node: Node, move: str, image_bytes: int) -> AsyncIterator[None]:
    """Room for an image, which is given up if the move is not journalled inside. Raises Full. Nothing that other moves need
    may be held meanwhile: a disk may not answer."""
    with waiting_for_disk():
        await in_thread(node.store.create_kept, move, image_bytes + kept_files.ROOM_BYTES)
    try:
        yield
    except BaseException:
        if node.journal.find(move) is None:
            await in_thread(node.store.drop, move)
        raise


def planned(request: pb.PrepareRequest) -> tuple[list[pb.Rewire], list[ClusterNode]]:
    """The rank's connections as they will be, and the nodes of the cluster. Raises Refused if its addresses are not clear, or
    taken. Blocking."""
    check_move_id(request.coordinator.record)
    uid = request.facts.rank.uid
    ranks = [rejoin.Resumed(one.rank_uid, one.from_node, one.to_node, list(one.rewires)) for one in request.ranks]
    if uid not in {rank.uid for rank in ranks}:
        raise Usage("a rank is resumed with a list of the ranks that it is connected with, itself included")
    rewires, problems = rejoin.plan(uid, ranks, list(request.nodes))
    if problems:
        raise Refused(f"new-addresses: {'; '.join(problems[:5])}", remedy=NAME_THE_NETWORK, where=Where.SUSPENDED)
    connections.remove_orphans(rewires)  # no copy of any rank of the job is restored yet that their resets could reach
    for check in connections.examine(rewires, uid):
        if check.verdict == pb.Check.REFUSE:
            raise Refused(f"{check.name}: {check.reason}", remedy=check.remedy, where=Where.SUSPENDED)
    return rewires, [ClusterNode.of(node) for node in request.nodes]


def file_policy(request: pb.PrepareRequest) -> str:
    """What is done with files that have changed since the snapshot. Raises Usage."""
    if request.changed_files and request.changed_files not in set(Policy):
        raise Usage(f"{request.changed_files!r} is none of {', '.join(Policy)}")
    return request.changed_files


def must_be_first(moves: Iterable[Moving], rank_uid: str) -> None:
    """Raises Busy while an earlier attempt to resume the rank on this node is not cleaned up."""
    for older in moves:
        if older.log.begin.rank_uid == rank_uid and not older.done:
            raise Busy(f"move {older.log.move} of this rank to here is not cleaned up yet", where=Where.SUSPENDED)


async def check_coordinator(node: Node, request: pb.PrepareRequest) -> pb.Outcome:
    """What the coordinator says about its record, which is open. Raises Unreachable if it does not answer: this node could
    not learn how the resumption ends. Raises Refused if the rank is another one there than the driver was told."""
    coordinator = request.coordinator
    try:
        async with node.client(coordinator.node, coordinator.endpoint) as client:
            found = await client.job.GetOutcome(
                pb.MoveRequest(move=coordinator.record, part=request.move), timeout_s=ASK_S
            )
    except SnapshotError as error:
        raise Unreachable(
            f"{coordinator.node}, the coordinator of the job, does not answer {node.config.node} at"
            f" {coordinator.endpoint}: {error.headline}",
            where=Where.SUSPENDED,
        ) from error
    if found.kind != pb.UNDECIDED:
        raise WrongState(f"{coordinator.record} has ended: {found.reason}", where=Where.SUSPENDED)
    if found.job:
        must_be_named(found, request, node.config.node)
    return found


def must_be_named(said: pb.Outcome, request: pb.PrepareRequest, here: str) -> None:
    """Raises Refused unless the coordinator's record has this rank, with this part, on this node. The node that has the rank
    says whose it is, so it could give it the name of a rank of another job or user."""
    named, rank = said.participant, request.facts.rank
    claimed = (rank.uid, rank.rank, rank.job, rank.user_id)
    at = named.copy_node if request.keep else named.node
    part = named.copy if request.keep else named.move
    if (named.rank_uid, named.rank, said.job, said.user_id) != claimed or (part, at) != (request.move, here):
        raise Refused(
            f"{request.coordinator.node}, the coordinator of the job, does not know {request.move} as a part of rank"
            f" {rank.rank} of job {rank.job[:80]} of user {rank.user_id} ({rank.uid[:80]}) on {here}",
            remedy=f"find out what runs on {request.facts.source_node[:80]}, which has the rank; do not trust it until then",
            where=Where.UNTOUCHED,
        )
