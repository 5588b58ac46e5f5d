"""Reads the description of an image that has arrived, and checks that it is of the rank that this node agreed to take."""

from __future__ import annotations

from pathlib import Path

from snapshotd.api.errors import Damaged, Denied, Where
from snapshotd.moves import description
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.journal import MoveLog
from snapshotd.runtime.blocking import in_thread


async def read_description(folder: Path) -> ImageDescription:
    try:
        return await in_thread(_read, folder / description.FILE)
    except OSError as error:
        raise Damaged(f"the description of the image cannot be read: {error}", where=Where.SOURCE_FROZEN) from error


def _read(path: Path) -> ImageDescription:
    with path.open("rb") as file:
        return description.decode(file.read(description.MAX_BYTES + 1))


def must_be_of_rank(move_log: MoveLog, image: ImageDescription) -> None:
    """The image must be of the user and groups that preflight was shown. Raises Denied."""
    shown = move_log.record.identity
    if image.user_id != move_log.begin.user_id:
        raise Denied(
            f"the image is of a rank of user {image.user_id}; this node agreed to one of user {move_log.begin.user_id}",
            remedy="the move is undone; check the source node, its daemon must not do this",
            where=Where.SOURCE_FROZEN,
        )
    if image.identity != shown:
        raise Denied(
            f"the image is of a rank that runs as {image.identity}; this node agreed to one that runs as {shown}",
            remedy="the move is undone; check the source node, its daemon must not do this",
            where=Where.SOURCE_FROZEN,
        )
