"""What both ends tell their children: which files, and who they are."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import Internal
from snapshotd.images.frame import IMAGE_NAME

MAX_STRIPES = 255  # the number is a byte of the greeting


def checked(names: Sequence[str]) -> Sequence[str]:
    """Internal where they are not names of image files, each once: they become paths."""
    wrong = [name for name in names if not IMAGE_NAME.fullmatch(name)]
    if wrong or len(set(names)) != len(names) or not 0 < len(names) <= MAX_STRIPES:
        raise Internal(f"stripes cannot be called {list(names)!r}")
    return names


def identity(credentials: Credentials, peer: str) -> dict[str, str]:
    return {"ca": str(credentials.ca), "cert": str(credentials.cert), "key": str(credentials.key), "peer": peer}
