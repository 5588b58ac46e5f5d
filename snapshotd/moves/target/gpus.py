"""Chooses the GPU of this node that an arriving rank will use.

A reservation is a field of the move's record: it lasts until the move has ended, and no crash loses it or leaves it behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda import pairing
from snapshotd.moves.journal import Journal
from snapshotd.moves.node import Node
from snapshotd.moves.rules import Mark
from snapshotd.proc import host

log = logging.getLogger(__name__)


def with_reservations(journal: Journal, found: Iterable[pb.Gpu]) -> list[pb.Gpu]:
    """This node's GPUs, each with the move that will use it. A leaving rank reserves its GPU, because it may have to come
    back."""
    reserved: dict[str, str] = {}
    for move_log in journal.all():
        role, last = move_log.begin.role, move_log.last_mark
        if role == "target" and last not in {Mark.DISCARDED, Mark.ACTIVATED}:
            reserved |= dict.fromkeys(move_log.record.gpus_reserved, move_log.move)
        elif role == "source" and last is not Mark.SETTLED and move_log.begin.boot_id == host.boot_id():
            reserved |= dict.fromkeys(move_log.record.gpu_uses, move_log.move)
    answer = []
    for each in found:
        copy = pb.Gpu(reserved_for=reserved.get(each.uuid, ""))
        copy.MergeFrom(each)
        answer.append(copy)
    return answer


async def choose(node: Node, request: pb.PrepareRequest) -> list[tuple[str, str]]:
    """(GPU of the source, GPU here that replaces it) for each; empty for a rank without CUDA."""
    if not request.facts.HasField("gpu"):
        return []
    inventory = await node.gpus.inventory(fresh=True)
    cards = with_reservations(node.journal, inventory.gpus)
    resumes = request.HasField("coordinator")
    pairs, reason = pairing.choose(request.facts.gpu, cards, request.gpu, resumes=resumes)
    log.info("move %s: %s", request.move, reason)
    return [(pair.old_uuid, pair.new_uuid) for pair in pairs]
