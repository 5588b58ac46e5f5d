"""Which of the nodes that keep an image of a rank is asked for it. Pure.

Every rank of a snapshot has an image on the node where it was made, and copies on others. Whether an image can be read is
known only when it is sent or restored. Then the attempt is undone, and the next one does without that image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from migrator.job_results import UnreadableImage
from snapshotd.api.errors import Unreadable, Where


class Place(Protocol):
    """A node that has an image of the rank, and the move by which it has it."""

    node: str
    move: str


Kept = TypeVar("Kept", bound=Place)


def in_order(kept: Iterable[Kept], answering: Collection[str], unreadable: Collection[str]) -> list[Kept]:
    """The places to ask, best first. `kept`: the image, then its copies. `unreadable`: images that are of no use."""
    return sorted((one for one in kept if one.move not in unreadable), key=lambda one: one.node not in answering)


def none_left(
    job: str, rank: int, unreadable: Iterable[UnreadableImage], others: Sequence[str], where: Where
) -> Unreadable:
    """`others`: why the places that may be good cannot be used now."""
    tried = [f"{one.node}: {one.reason}" for one in unreadable if one.rank == rank]
    return Unreadable(
        f"no image of rank {rank} of job {job} can be read: {'; '.join([*tried, *others])}",
        remedy="if a node that keeps one does not answer, start it; mend a disk that cannot be read; then retry. If no image"
        f" is left, start the job again, after `migrator job drop {job}`",
        where=where,
    )
