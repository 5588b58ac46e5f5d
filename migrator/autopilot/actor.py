"""The lock of the one process that moves ranks for a state folder: the autopilot, or a verb if no autopilot runs.

Invariant: the kernel releases the lock when its holder ends, however it ends. So a lock that is held has a living holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from snapshotd.api.errors import Busy

FILE = "actor.lock"


@contextlib.contextmanager
def acting(folder: Path) -> Iterator[bool]:
    """Takes the lock while the context lasts. Yields False if another process has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Like `acting`. Raises Busy if another process has the lock."""
    with acting(folder) as first:
        if not first:
            raise Busy(
                f"another autopilot, or a verb that moves ranks, uses {folder}",
                remedy="one autopilot per state folder: stop the other one, or name another folder with --state",
            )
        yield
