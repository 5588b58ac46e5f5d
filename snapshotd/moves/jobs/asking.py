"""Asks the coordinator of a job for the outcome that decides about the move of one of its ranks."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves.job_rules import Answer
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin

ASK_S = 5.0

_ANSWERS = {pb.UNDECIDED: Answer.UNDECIDED, pb.COMMIT: Answer.COMMIT, pb.ABORT: Answer.ABORT}


async def ask(node: Node, begin: Begin) -> tuple[Answer, str]:
    """The coordinator's answer, and its reason or why there is none. Never raises."""
    try:
        async with node.client(begin.coordinator_node, begin.coordinator_endpoint) as client:
            found = await client.job.GetOutcome(pb.MoveRequest(move=begin.coordinator), timeout_s=ASK_S)
    except NotFound as error:
        return Answer.UNKNOWN, error.headline
    except SnapshotError as error:
        return Answer.UNREACHABLE, error.headline
    return _ANSWERS.get(found.kind, Answer.UNDECIDED), found.reason
