"""Children that a restore needs are started before its pause: when a move is prepared, and again when one has ended."""

from __future__ import annotations

import asyncio
import logging

from snapshotd.api.errors import SnapshotError
from snapshotd.criu import parsers
from snapshotd.proc import foreign_memory
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: How long after a move the next ones are started: the rank and its peers go on first.
_LATER_S = 3.0
_running: set[asyncio.Task[None]] = set()


async def start_spares() -> None:
    """Starts those that are missing. If that fails, the restore starts its own, and fails with the reason."""
    try:
        await in_thread(foreign_memory.prepare)
        await in_thread(parsers.spares.fill)
    except SnapshotError as error:
        log.warning("no child was started in advance: %s", error.message)


def start_spares_later() -> None:
    asyncio.get_running_loop().call_later(_LATER_S, _start)


def _start() -> None:
    task = asyncio.create_task(start_spares(), name="children for the next move")
    _running.add(task)
    task.add_done_callback(_running.discard)
