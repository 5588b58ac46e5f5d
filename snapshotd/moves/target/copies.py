"""Keeps copies of the images of other nodes' ranks, for the snapshots of their jobs: this node is the buddy of those ranks.

Invariant: see `job_rules.copy_next`. A copy comes like the image of a move, and is sealed like it, but nothing is restored
from it here. It lies in memory, or on a disk if there is none. It is dropped when its coordinator says that it is not needed
any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Answer, CopyDecision
from snapshotd.moves.jobs import asking, stored
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.target import preparing, resumed
from snapshotd.moves.target.source_signature import SourceSignatures
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.transport.image.bulk_receiver import BulkReceivers


async def prepare(
    node: Node, signatures: SourceSignatures, request: pb.PrepareRequest, wanted: Callable[[], Awaitable[None]]
) -> MoveLog:
    """Reserves room for a copy. Raises Full, with what is needed and what is free. A copy that the coordinator has not named,
    because its version cannot, is of no user: no image is searched for its blocks. `wanted` raises WrongState if the snapshot
    was given up meanwhile."""
    facts, config = request.facts, node.config
    check_move_id(request.coordinator.record)
    if facts.source_node == config.node:
        raise Usage("the copy of an image is kept on another node than the image")
    said = await resumed.check_coordinator(node, request)
    await signatures.meet(facts.source_node, request.source_endpoint)
    await reach(Point.BEFORE_PREPARE)
    user_id = said.user_id if said.job else -1
    begin = preparing.begin_of(config, request, facts.source_node, user_id, kind="copy")
    async with resumed.room(node, request.move, facts.memory_bytes + facts.carried_bytes):
        await wanted()
        move_log = await in_thread(node.journal.begin, begin)
    await in_thread(stored.write_facts, move_log, facts)
    await in_thread(move_log.mark, Mark.PREPARED, asked_copies=said.copies)
    await reach(Point.PREPARE)
    return move_log


def is_held(moving: Moving) -> bool:
    """Whether a restored copy is here that may neither run nor be dropped yet."""
    move_log = moving.log
    return move_log.last_mark is Mark.HELD and move_log.outcome is None and move_log.copy_exists()


def held_of(moves: Iterable[Moving], record: str) -> list[Moving]:
    """All copies that are held for a record that resumes a job."""
    return [moving for moving in moves if moving.log.begin.coordinator == record and is_held(moving)]


def is_unattached(move_log: MoveLog) -> bool:
    """Whether the communicators of a copy that is resumed with its job are not built again yet."""
    record = move_log.record
    return bool(move_log.begin.coordinator and record.nccl_processes and not record.attached)


async def settle(node: Node, receivers: BulkReceivers, moving: Moving) -> None:
    """Carries out decisions of the rules. The caller holds the move's lock."""
    move_log = moving.log
    for _ in range(3):
        said, why = Answer.UNDECIDED, ""
        if move_log.outcome is None:
            said, why = await asking.ask(node, move_log.begin)
        outcome = move_log.outcome.outcome if move_log.outcome is not None else None
        decision, reason = job_rules.copy_next(move_log.last_mark, outcome, said)
        moving.waiting_for = f"{reason}: {why}" if why else reason
        match decision:
            case CopyDecision.RECORD_COMMIT:
                await in_thread(move_log.decide, Outcome.COMMIT, why or reason, "coordinator")
            case CopyDecision.RECORD_ABORT:
                await in_thread(move_log.decide, Outcome.ABORT, why or reason, "coordinator")
            case CopyDecision.KEEP:
                await in_thread(move_log.mark, Mark.SETTLED)
            case CopyDecision.DROP:
                with node.store.threads(move_log.move):
                    await in_thread(receivers.close, move_log.move)
                await in_thread(node.store.drop, move_log.move)
                await in_thread(move_log.mark, Mark.DISCARDED)
            case CopyDecision.CLOSE:
                moving.done = True
                return
            case _:
                return
