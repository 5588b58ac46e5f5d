"""What the target of a move asks of its source: whether it is there and knows the move, and whether its version fits."""

from __future__ import annotations

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Internal, NotFound, SnapshotError, Unreachable, Where
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin

CHECK_TIMEOUT_S = 10.0


async def answers(node: Node, begin: Begin) -> bool:
    """Whether it answers, and knows the move: then only its record decides."""
    try:
        async with node.client(begin.source_node, begin.source_endpoint) as client:
            await client.source.GetOutcome(pb.MoveRequest(move=begin.move), timeout_s=5)
    except SnapshotError:
        return False
    return True


async def must_answer(node: Node, name: str, request: pb.PrepareRequest) -> None:
    """Raises Unreachable if the source does not answer: this node could not learn how the move ends."""
    try:
        async with node.client(name, request.source_endpoint) as client:
            await client.source.GetOutcome(pb.MoveRequest(move=request.move), timeout_s=CHECK_TIMEOUT_S)
    except NotFound:
        return  # it answers, and has not begun the move yet
    except SnapshotError as error:
        raise Unreachable(
            f"{name}, the source of the move, does not answer {node.config.node} at {request.source_endpoint}:"
            f" {error.headline}",
            where=Where.SOURCE_RUNNING,
        ) from error


def must_be_sealed(sealed: bool, caller: str) -> None:
    """Raises Internal if the source has other data connections: an older version, which then does without them."""
    if not sealed:
        raise Internal(f"{caller} has an older version, with other data connections", remedy=protocol.REMEDY)
