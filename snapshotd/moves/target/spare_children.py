"""Children that a restore needs are started before its pause: when a move is prepared, and again when one has ended.

Those that moves were given for files and did not need are ended when no move is under way: one after another, moves would
leave more and more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from snapshotd.api.errors import SnapshotError
from snapshotd.criu import parsers
from snapshotd.files import as_user
from snapshotd.moves.target import waiting_keepers
from snapshotd.proc import foreign_memory
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: How long after a move the next ones are started: the rank and its peers go on first.
_LATER_S = 3.0
#: How many children for files wait for the next move.
_FILES = 2
_running: set[asyncio.Task[None]] = set()


async def start_keeper(criu: str) -> None:
    """Starts a guest keeper for a restore. If that fails, the restore starts its own, and fails with the reason."""
    try:
        await in_thread(waiting_keepers.prepare, criu)
    except SnapshotError as error:
        log.warning("no guest keeper was started in advance: %s", error.message)


async def start_spares() -> None:
    """Starts those that are missing. If that fails, the restore starts its own, and fails with the reason."""
    try:
        await in_thread(foreign_memory.prepare)
        await in_thread(parsers.spares.fill)
    except SnapshotError as error:
        log.warning("no child was started in advance: %s", error.message)


def start_spares_later(under_way: Callable[[], bool]) -> None:
    """`under_way`: whether a move is, when the time has come."""
    asyncio.get_running_loop().call_later(_LATER_S, _start, under_way)


def _start(under_way: Callable[[], bool]) -> None:
    task = asyncio.create_task(_renew(under_way), name="children for the next move")
    _running.add(task)
    task.add_done_callback(_running.discard)


async def _renew(under_way: Callable[[], bool]) -> None:
    if not under_way():
        await in_thread(as_user.spares.trim, _FILES)
        await in_thread(waiting_keepers.close)  # the next move starts its own, while it is prepared
    await start_spares()
