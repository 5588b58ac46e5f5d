"""Remembers which closed files ranks left on this node when they moved away, and how these looked then.

A file that still looks so may be replaced when a rank comes back with another one of that name. The daemon is the only
writer: the ledger is read once. Every method may be called from any thread.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

#: How much is remembered: a file counts once for each _UNIT_CHARS of its path, so about 50,000 files. Users with few files
#: keep all of them; of those with more, the oldest are forgotten first.
_MOST = 50_000
_UNIT_CHARS = 256
_NUMBERS = 5  # of an identity


class ClosedLedger:
    """Full path -> identity (snapshotd/files/closed.py), then the user whose file it is, except in older ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, list[int]] | None = None

    def get(self, path: str) -> list[int] | None:
        with self._lock:
            known = self._read().get(path)
            return known[:_NUMBERS] if known is not None else None

    def remember(self, files: Iterable[tuple[str, list[int]]], forgotten: Iterable[str], user_id: int) -> None:
        """`forgotten` are files that the rank had open this time: another ledger has them."""
        with self._lock:
            known = dict(self._read())
            for path in forgotten:
                known.pop(path, None)
            for path, seen in files:
                known.pop(path, None)  # the newest are last
                known[path] = [*seen, user_id]
            known = _shared_out(known)
            self._known = known
            side = self._path.with_suffix(".new")
            try:
                side.write_text(json.dumps(known))
                os.rename(side, self._path)
            except OSError as error:  # the move must end; at worst a file stays that could have been replaced
                log.warning("%s is not up to date: %s", self._path, error)

    def _read(self) -> dict[str, list[int]]:
        if self._known is None:
            try:
                known = json.loads(self._path.read_text())
            except (FileNotFoundError, ValueError):
                known = {}
            self._known = known if isinstance(known, dict) else {}
        return self._known


def _shared_out(known: dict[str, list[int]]) -> dict[str, list[int]]:
    """What is kept: no user can have the files of others forgotten."""
    used: dict[int, int] = {}
    for path, seen in known.items():
        used[_owner(seen)] = used.get(_owner(seen), 0) + _units(path)
    share = _fair_share(list(used.values()))
    left = dict.fromkeys(used, share)
    kept = []
    for path, seen in reversed(known.items()):
        left[_owner(seen)] -= _units(path)
        if left[_owner(seen)] >= 0:
            kept.append((path, seen))
    return dict(reversed(kept))


def _owner(seen: list[int]) -> int:
    return seen[_NUMBERS] if len(seen) > _NUMBERS else -1


def _units(path: str) -> int:
    return 1 + len(path) // _UNIT_CHARS


def _fair_share(used: list[int]) -> int:
    """The most that each may have, so that all have at most _MOST together."""
    left = _MOST
    for number, one in enumerate(sorted(used)):
        others = len(used) - number
        if one * others > left:
            return left // others
        left -= one
    return _MOST
