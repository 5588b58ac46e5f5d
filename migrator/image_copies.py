"""The copies of a rank's image, as a participant of a snapshot names them: the first one in fields of its own, the others
in a list. Nothing else knows that there are two places for them."""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb


def copies_of(part: pb.Participant) -> list[pb.ImageCopy]:
    """All of them, the first buddy's first."""
    first = pb.ImageCopy(move=part.copy, node=part.copy_node, endpoint=part.copy_endpoint)
    return [first, *part.more_copies] if part.copy else list(part.more_copies)


def set_copies(part: pb.Participant, copies: Iterable[pb.ImageCopy]) -> None:
    first, *more = copies
    part.copy, part.copy_node, part.copy_endpoint = first.move, first.node, first.endpoint
    del part.more_copies[:]
    part.more_copies.extend(more)


def nodes_of(part: pb.Participant) -> list[str]:
    return [copy.node for copy in copies_of(part)]
