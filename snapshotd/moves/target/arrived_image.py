"""Reads the description of an image that has arrived, and checks that it is of the rank that this node agreed to take, and
what the node that has made it for a snapshot has signed.

Invariant: what another node than that has kept is not restored unless it is signed, if the coordinator's record says that it
was. An image that was on this node all the time is not compared: who can change it is root here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Denied, Unreadable, Where
from snapshotd.moves import description
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.jobs import made_image
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)


async def read_description(folder: Path) -> ImageDescription:
    try:
        return await in_thread(_read, folder / description.FILE)
    except OSError as error:
        raise Damaged(f"the description of the image cannot be read: {error}", where=Where.SOURCE_FROZEN) from error


def _read(path: Path) -> ImageDescription:
    with path.open("rb") as file:
        return description.decode(file.read(description.MAX_BYTES + 1))


def must_be_of_rank(move_log: MoveLog, image: ImageDescription) -> None:
    """The image must be of the user and groups that preflight was shown. Raises Denied, or Unreadable for an image that
    another node may keep, too."""
    shown, found = move_log.record.identity, ""
    if image.user_id != move_log.begin.user_id:
        found = f"of a rank of user {image.user_id}; this node agreed to one of user {move_log.begin.user_id}"
    elif image.identity != shown:
        found = f"of a rank that runs as {image.identity}; this node agreed to one that runs as {shown}"
    if found and must_be_signed(move_log):  # who described it keeps a copy: there may be another one
        raise Unreadable(f"the image is {found}", where=Where.SUSPENDED)
    if found:
        raise Denied(
            f"the image is {found}",
            remedy="the move is undone; check the source node, its daemon must not do this",
            where=Where.SOURCE_FROZEN,
        )


def take_made(node: Node, move_log: MoveLog, request: pb.SealRequest) -> None:
    """Keeps what the node that has made the image has signed, beside the journal. Raises Unreadable if it has not signed
    these files. Blocking."""
    begin, credentials = move_log.begin, node.credentials
    if begin.kind == "copy":
        if not request.HasField("made"):
            return  # from a node with an older version: the coordinator's record says that it does not sign
        maker, snapshot = begin.source_node, begin.coordinator
    elif must_be_signed(move_log):
        maker, snapshot = move_log.record.maker, move_log.record.snapshot
    else:
        return
    try:
        made_image.must_be_by(request.made, maker, begin.rank_uid, snapshot, request.files, credentials)
    except Unreadable as error:
        log.error("%s has sent an image that is refused: %s", begin.source_node, error.message)
        raise
    made_image.save(move_log, request.made)


async def must_be_as_made(folder: Path, move_log: MoveLog) -> None:
    """Raises Unreadable unless the files that have arrived are those that were signed."""
    made = await in_thread(made_image.load, move_log)
    if made is None:
        raise Unreadable(f"the signature of the image of {move_log.move} is lost", where=Where.SUSPENDED)
    try:
        files = await in_thread(lambda: sorted(path for path in folder.iterdir() if not path.name.startswith(".")))
        await made_image.must_be_whole(made, files)
    except OSError as error:
        raise Damaged(f"the image that has arrived cannot be read: {error}", where=Where.SUSPENDED) from error
    except Unreadable as error:
        log.error("%s has sent an image that is refused: %s", move_log.begin.source_node, error.message)
        raise


def must_be_signed(move_log: MoveLog) -> bool:
    """Whether the image is one of a snapshot, and comes from another node."""
    begin = move_log.begin
    return bool(move_log.record.maker) and begin.source_node != begin.target_node


def must_have_connections(move_log: MoveLog, image: ImageDescription) -> None:
    """The addresses of a rank that is resumed were planned with what the node that keeps the image said about its
    connections. Raises Unreadable if that is not what the image has."""
    if must_be_signed(move_log) and _named(move_log.record.rewires) != _named(image.rewires):
        text = f"{move_log.begin.source_node} has described other connections than its image of the rank has"
        raise Unreadable(text, remedy=made_image.REMEDY, where=Where.SUSPENDED)


def _named(rewires: Iterable[pb.Rewire]) -> list[tuple[int, str, int, str, int]]:
    ends = [(one.kind, one.old_local, one.old_remote) for one in rewires]
    return sorted((kind, local.ip, local.port, remote.ip, remote.port) for kind, local, remote in ends)
