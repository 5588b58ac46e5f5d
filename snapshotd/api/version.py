"""Versions of programs. Which of them understand each other says protocol.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

from snapshotd import __version__

#: Written into a wheel when it is built (setup.py). A checkout has none.
_BUILD = Path(__file__).parents[1] / "build.json"


def version_pair(text: str) -> tuple[int, int] | None:
    """Major and minor of a version as programs print it, or None if the text contains none."""
    found = re.search(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else None


def described() -> str:
    """The version of this program, with commit and date if it is an installed build."""
    try:
        build = json.loads(_BUILD.read_text())
        return f"{__version__} (commit {build['commit'][:12]}, built {build['date']})"
    except (OSError, ValueError, KeyError):
        return __version__
