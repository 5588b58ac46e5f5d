"""Which images on this node have blocks in common with a copy that arrives for a snapshot.

Invariant: only images of the same user's same job. A node must not learn from another one whether an image of somebody else
contains a block. Nothing is waited for here: threads that wait could be those which the awaited work needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from snapshotd.api.errors import NotFound
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin


def images_for(node: Node, move: str) -> tuple[Hashable, Sequence[Path]]:
    """Those of the ranks that run here, in the same snapshot, and the copies of the same rank in earlier ones. The copies of
    all ranks in one snapshot share them. Blocking."""
    move_log = node.journal.find(move)
    if move_log is None or move_log.begin.kind != "copy":
        return None, ()
    copy = move_log.begin
    usable = []
    for image in sorted(node.store.moves() - {move}):
        other = node.journal.find(image)
        if other is not None and _in_common(copy, other.begin) and node.store.sealed(image):
            with suppress(NotFound):  # dropped in the meantime
                usable.append(node.store.path(image))  # perhaps not whole yet, if the driver is older: it does not wait
    return (copy.user_id, copy.job, copy.coordinator), usable


def _in_common(copy: Begin, other: Begin) -> bool:
    """Whose a copy is, its coordinator has confirmed (moves/target/resumed.py). A coordinator may only name its own jobs."""
    if copy.user_id < 0 or (other.user_id, other.job) != (copy.user_id, copy.job):
        return False
    if other.coordinator_node != copy.coordinator_node:
        return False
    if other.kind == "snapshot" and other.role == "source":
        return other.coordinator == copy.coordinator
    return other.kind == "copy" and other.rank_uid == copy.rank_uid
