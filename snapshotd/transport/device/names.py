"""What the stripes of a lane may be called."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api.errors import Internal
from snapshotd.transport.image.frame import IMAGE_NAME

#: The most names that one lane can have: a stripe's number is a byte of the greeting (key.py).
MAX_STRIPES = 256


def checked(names: Sequence[str]) -> Sequence[str]:
    """Internal where they are not names of image files, each once: they become paths."""
    if not 0 < len(names) <= MAX_STRIPES:
        raise Internal(f"{len(names)} stripes: a lane can have 1 to {MAX_STRIPES}")
    wrong = [name for name in names if not IMAGE_NAME.fullmatch(name)]
    if wrong or len(set(names)) != len(names):
        raise Internal(f"stripes cannot be called {list(names)!r}")
    return names
