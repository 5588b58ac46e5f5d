"""Drops the images of a job that runs again or was given up, on all nodes that have them.

Invariant: a node that fails does not keep others from being asked. Dropping is idempotent, so it is repeated until all nodes
have confirmed it; the coordinator's record is not settled before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Timeout, Unreachable, Where
from snapshotd.moves.node import Node
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.record_parts import JobPart

DROP_S = 10.0

#: Node, endpoint, and the rank's move in the suspension.
Image = tuple[str, str, str]


class NotDropped(Unreachable):
    """Not every node has confirmed that it has dropped its images."""

    def __init__(self, left: list[str]) -> None:
        super().__init__(f"these images are not dropped yet: {'; '.join(left[:5])}", where=Where.UNKNOWN)
        self.left = left


def images_of(record: MoveRecord) -> list[Image]:
    """The images of the job, from the record of its suspension or of a resumption."""
    return [_image(part) for part in record.participants]


def _image(part: JobPart) -> Image:
    return (part.image_node, part.image_endpoint, part.image) if part.image else (part.node, part.endpoint, part.move)


async def drop(node: Node, images: Iterable[Image], reason: str, *, given_up: bool, ended: str = "") -> list[str]:
    """Has the images dropped, on all nodes at once. Returns what is not confirmed, for display; empty: all are gone. `ended`:
    the records that have ended copies of the job."""
    by_node: dict[tuple[str, str], list[str]] = {}
    for name, endpoint, image in images:
        by_node.setdefault((name, endpoint), []).append(image)

    async def ask(name: str, endpoint: str, wanted: list[str]) -> list[str]:
        left = []
        try:
            async with node.client(name, endpoint) as client:
                for image in wanted:
                    try:
                        request = pb.DropImageRequest(image=image, reason=reason, given_up=given_up, ended=ended)
                        await client.source.DropImage(request, timeout_s=DROP_S)
                    except (Unreachable, Timeout):
                        raise
                    except SnapshotError as error:
                        left.append(f"{image} on {name}: {error.headline}")
        except SnapshotError as error:
            left.append(f"images on {name}: {error.headline}")
        return left

    answers = await asyncio.gather(*(ask(*where, wanted) for where, wanted in by_node.items()))
    return [one for answer in answers for one in answer]
