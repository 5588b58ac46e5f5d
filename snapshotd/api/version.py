"""Versions of programs, and which versions of migrator and snapshotd understand each other."""

from __future__ import annotations

import re


def version_pair(text: str) -> tuple[int, int] | None:
    """Major and minor of a version as programs print it, or None if the text contains none."""
    found = re.search(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else None


def compatible(one: str, other: str) -> bool:
    """Whether two of our programs understand each other: calls change with the minor version."""
    return one == other or (version_pair(one) is not None and version_pair(one) == version_pair(other))
