"""The names that stripes may have."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api.errors import Internal
from snapshotd.transport.image.frame import IMAGE_NAME

#: The number of a stripe is one byte.
MAX_STRIPES = 256


def purpose_of(number: int, name: str) -> bytes:
    """What the source sends to say which stripe a connection is for (handshake.py)."""
    return bytes([number]) + name.encode()


def checked(names: Sequence[str]) -> Sequence[str]:
    """Internal unless all are distinct names of image files: they become paths."""
    if not 0 < len(names) <= MAX_STRIPES:
        raise Internal(f"{len(names)} stripes: a device-memory channel can have 1 to {MAX_STRIPES}")
    wrong = [name for name in names if not IMAGE_NAME.fullmatch(name)]
    if wrong or len(set(names)) != len(names):
        raise Internal(f"stripes cannot have the names {list(names)!r}")
    return names
