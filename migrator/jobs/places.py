"""Which of the nodes that keep an image of a rank is asked for it. Pure.

Every rank of a snapshot has an image on the node where it was made, and copies on others. Whether an image can be read is
known only when it is sent or restored. Then the attempt is undone, and the next one does not use that image. The same holds
for an image that does not reach its target: after one failure the next attempt uses another image, because all images of a
rank are equal, and nobody knows how long the failure lasts. When all have failed, the rollback ends as undone. A repeated
rollback starts with the first image again, because the failure may be over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from migrator.job_results import UnreadableImage
from snapshotd.api.errors import (
    Damaged,
    Denied,
    Internal,
    NotFound,
    SnapshotError,
    Timeout,
    Unreachable,
    Unreadable,
    Where,
)

#: Errors of the node that has an image, or of the way from there, if they are not the target's. Others, such as Full, are.
_OF_THE_WAY = (Unreachable, Timeout, Damaged, Denied, NotFound, Internal)


class Place(Protocol):
    """A node that has an image of the rank, and the move by which it has it."""

    node: str
    move: str


Kept = TypeVar("Kept", bound=Place)


def is_of_the_way(error: SnapshotError, holder: str, target: str, *, sends: bool) -> bool:
    """Whether another image may reach the target, which answers, although that of `holder` did not. A fault of the target
    itself would be one with every image. `sends`: the holder was asked, which passes on what the target has answered; else
    the target, whose errors are its own unless it names the holder."""
    if not isinstance(error, _OF_THE_WAY):
        return False
    if not sends:
        return error.of_node == holder != target
    # What has arrived damaged may have been so when it left. A node that sends to itself does not say as which it fails.
    return error.of_node != target or holder == target or isinstance(error, Damaged)


def in_order(
    kept: Iterable[Kept], answering: Collection[str], unreadable: Collection[str], unsent: Collection[str] = ()
) -> list[Kept]:
    """The places to ask, best first. `kept`: the image, then its copies. `unreadable`: images that are of no use. `unsent`:
    those that did not arrive."""
    left = (one for one in kept if one.move not in unreadable)
    return sorted(left, key=lambda one: (one.move in unsent, one.node not in answering))


def goes_on(
    failed: Sequence[tuple[int, str]],
    kept: Mapping[int, Collection[str]],
    unreadable: Collection[str],
    unsent: Collection[str],
) -> bool:
    """Whether another attempt is made after one that has failed because of these images: number of the rank, and image.
    `kept`: all images of each rank. `unreadable`, `unsent`: what was known before the attempt, and what it has found.

    An unreadable image is not used again, so there is an end. For one that did not arrive there must be another one that has
    not been tried, and it must be the first time: a node with an untried one may not answer."""

    def may_help(rank: int, image: str) -> bool:
        left = set(kept[rank]) - set(unreadable) - set(unsent)
        return image in unreadable or (bool(left) and list(unsent).count(image) == 1)

    return bool(failed) and all(may_help(*one) for one in failed)


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
