"""Reads and writes the entries of an image file as messages of CRIU's own types.

pycriu's `load` and `dump` convert every message to a dictionary and back, which takes ten times as long; a rank waits for it.
Only for files whose entries are not followed by other data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from snapshotd.api.errors import Damaged, Where

HEADER_BYTES = 8  # two magic numbers
_SIZE = struct.Struct("<I")


def load(path: Path, kind: Any) -> list[Any]:
    """The messages of this type in the file. Raises Damaged if it has others."""
    content = path.read_bytes()
    found, at, parse = [], HEADER_BYTES, kind.FromString
    try:
        while at < len(content):
            begin = at + _SIZE.size
            at = begin + _SIZE.unpack_from(content, at)[0]
            if at > len(content):
                raise Damaged(f"{path.name} ends early", where=Where.SOURCE_FROZEN)
            found.append(parse(content[begin:at]))
    except (struct.error, DecodeError) as error:
        raise Damaged(f"{path.name} cannot be read: {error}", where=Where.SOURCE_FROZEN) from error
    return found


def store(path: Path, entries: Iterable[Any]) -> None:
    """Replaces the entries of a file that exists."""
    with path.open("rb") as file:
        parts = [file.read(HEADER_BYTES)]
    for entry in entries:
        message = entry.SerializeToString()
        parts += (_SIZE.pack(len(message)), message)
    path.write_bytes(b"".join(parts))
