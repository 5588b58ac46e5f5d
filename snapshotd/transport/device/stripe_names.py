"""The names that stripes may have."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api.errors import Internal
from snapshotd.transport.image.frame import IMAGE_NAME

#: The number of a stripe is one byte of the greeting (authentication.py).
MAX_STRIPES = 256


def checked(names: Sequence[str]) -> Sequence[str]:
    """Internal unless all are distinct names of image files: they become paths."""
    if not 0 < len(names) <= MAX_STRIPES:
        raise Internal(f"{len(names)} stripes: a device-memory channel can have 1 to {MAX_STRIPES}")
    wrong = [name for name in names if not IMAGE_NAME.fullmatch(name)]
    if wrong or len(set(names)) != len(names):
        raise Internal(f"stripes cannot have the names {list(names)!r}")
    return names
