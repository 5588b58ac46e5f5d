"""The files beside the journal of a suspended rank: what a resumption has to know about its image, and its digests.

Invariant: they are on the disk before the move is marked STREAMED, so a whole image always has them. The digests are compared
before an image is sent: it may have lain on a disk for a long time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash
from google.protobuf.message import DecodeError

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreadable, Where
from snapshotd.moves.journal import MoveLog
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.sync import sync_folder

FACTS, DIGESTS = "facts.pb", "digests.json"
_BLOCK_BYTES = 1 << 20


def describe(images: Path, move_log: MoveLog, facts: pb.RankFacts) -> None:
    """Writes both files for a sealed image. Blocking. The image of a snapshot has no digests: it is in memory, not for
    long, and its rank waits meanwhile."""
    if move_log.begin.kind != "snapshot":
        digests = {path.name: digest(path) for path in _files(images)}
        write(move_log.folder / DIGESTS, json.dumps(digests).encode())
    write_facts(move_log, facts)


def is_whole(store: ImageStore, move_log: MoveLog) -> bool:
    """Whether the image is complete. The device memory of a snapshot, and memory that a twin of the rank has, get into its
    folder while the rank goes on, each file when it is complete."""
    if not store.sealed(move_log.move):
        return False
    if move_log.begin.kind != "snapshot" or move_log.ended_unix_s:
        return True
    folder = store.path(move_log.move)
    late = [
        (name, size) for one in move_log.record.offloaded for name, size in zip(one.stripes, one.bytes, strict=True)
    ] + move_log.record.late
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in late)


def write_facts(move_log: MoveLog, facts: pb.RankFacts) -> None:
    """Blocking."""
    write(move_log.folder / FACTS, facts.SerializeToString())
    sync_folder(move_log.folder)


def facts_of(move_log: MoveLog) -> pb.RankFacts:
    """Raises Unreadable. Blocking."""
    try:
        return pb.RankFacts.FromString((move_log.folder / FACTS).read_bytes())
    except (OSError, DecodeError) as error:
        raise Unreadable(f"the description of the image of {move_log.move} cannot be read: {error}") from error


def verified(images: Path, move_log: MoveLog) -> list[Path]:
    """The files of an image, in order. Raises Unreadable unless they are what was stored. Blocking."""
    try:
        if move_log.begin.kind:
            return _files(images)
        wanted: dict[str, str] = json.loads((move_log.folder / DIGESTS).read_bytes())
        found = {path.name: digest(path) for path in _files(images)}
    except (OSError, ValueError) as error:
        raise Unreadable(f"the image of {move_log.move} cannot be read: {error}", where=Where.UNKNOWN) from error
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise Unreadable(
            f"these files of the image of rank {move_log.begin.rank} have changed on the disk: {', '.join(wrong[:5])}",
            remedy="check the disk of that node; the job cannot be resumed from a damaged image",
            where=Where.UNKNOWN,
        )
    return [images / name for name in sorted(wanted)]


def digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            state.update(block)
    return state.hexdigest()


def _files(images: Path) -> list[Path]:
    return sorted(path for path in images.iterdir() if not path.name.startswith("."))


def write(path: Path, content: bytes) -> None:
    """Replaces a file. It is on the disk when its folder was synchronised. Blocking."""
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
