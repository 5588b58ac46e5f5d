"""The forms in which lists of closed files are sent and stored: JSON, with file names that need not be UTF-8.

A manifest comes from another node. Invariant: a row that is valid has a plain path below its carry path.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from snapshotd.api.errors import Damaged, Where
from snapshotd.files.closed import Row
from snapshotd.transport.image.receiving import AHEAD

FILE = "closed.json"  # in the image, and in the journal's folder of the move
MAX_BYTES = 64 << 20  # more than a look finds (snapshotd/files/closed.py)
MAX_PACKS = 2
#: Lists and objects in a manifest: each takes twenty times as much memory as text. A row has two, or three with `left`; the
#: others are characters of file names.
MAX_BRACKETS = 1_000_000
#: Names of image files: they become part of a path.
_PACK = re.compile(rf"late|{re.escape(AHEAD)}[0-9a-f]{{1,32}}")


class Manifest(msgspec.Struct):
    """What is sent with the image."""

    roots: list[str]
    packs: list[str]  # names of the image files that have the content
    rows: list[Row]


class Placed(msgspec.Struct):
    """What a move brought to its target."""

    roots: list[str]
    made: list[tuple[int, str, int, int, int]] = []  # number of the carry path, path, device, inode, modification time
    tops: list[str] = []  # the topmost paths of everything, also of what was there already


def save(path: Path, value: Any) -> None:
    """Durably: an undo may need it."""
    side = path.with_suffix(".new")
    with open(side, "w") as file:
        file.write(json.dumps(msgspec.to_builtins(value)))
        file.flush()
        os.fsync(file.fileno())
    os.rename(side, path)


def load_placed(folder: Path) -> Placed:
    """What a move made here, from the journal's folder of that move."""
    try:
        return msgspec.convert(json.loads((folder / FILE).read_text()), Placed)
    except (FileNotFoundError, ValueError):
        return Placed([])


def load_left(folder: Path) -> list[tuple[str, str, list[int]]]:
    """What a move took away from here."""
    try:
        return msgspec.convert(json.loads((folder / FILE).read_text()), list[tuple[str, str, list[int]]])
    except (FileNotFoundError, ValueError):
        return []


def read_manifest(path: Path) -> Manifest:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise Damaged(f"the list of closed files cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
    return parse_manifest(content)


def parse_manifest(content: bytes) -> Manifest:
    """Raises Damaged."""
    try:
        if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
            raise ValueError("it has more lists than rows need")
        manifest = msgspec.convert(json.loads(content.decode()), Manifest)
        if len(manifest.packs) > MAX_PACKS or not all(map(_PACK.fullmatch, manifest.packs)):
            raise ValueError("it names packs that cannot be")
        return manifest
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise Damaged(f"the list of closed files cannot be read: {error}", where=Where.SOURCE_FROZEN) from error


def must_be_valid(row: Row) -> None:
    """Raises Damaged."""
    try:
        name = os.fsencode(row.path + row.link)
    except UnicodeEncodeError:  # half a surrogate pair, which no name on a disk has
        name = b"\0"
    plain = os.path.normpath(row.path) == row.path and not row.path.startswith("/") and b"\0" not in name
    if not plain or row.path.split("/")[0] in (".", "..") or row.kind not in ("f", "d", "l") or len(row.seen) != 5:
        raise Damaged(f"the list of closed files is invalid: {row.path[:200]!r}", where=Where.SOURCE_FROZEN)
    numbers = (row.root, row.mode, row.group, row.size, row.offset)
    if min(numbers) < 0 or max(*map(abs, (row.atime_ns, row.mtime_ns)), *numbers) >= 1 << 63:
        raise Damaged(f"the list of closed files is invalid: {row.path[:200]!r}", where=Where.SOURCE_FROZEN)
