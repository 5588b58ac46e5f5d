"""The alarms that no daemon has, because the autopilot raised them itself or took them from outside.

They are in the autopilot's state, so they are known on its machine only, and to its user.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from migrator.cli import state
from snapshotd.api.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from migrator.autopilot.model import Alarm
    from migrator.autopilot.store import Store
    from migrator.cluster import Cluster

#: The autopilot renews alarms about jobs as long as it runs; older ones say nothing.
OLD_S = 120.0


def place(options: argparse.Namespace, cluster: Cluster) -> Path | None:
    """The folder of the autopilot's state. None: it is not on this machine, or of another user."""
    from migrator.autopilot.database import FILE

    with contextlib.suppress(OSError):
        if (named := state.folder(options, cluster)).joinpath(FILE).exists():
            return named
    return None


@contextlib.asynccontextmanager
async def opened(folder: Path | None, *, changing: bool = False) -> AsyncIterator[Store | None]:
    """The autopilot's state. None if it is not here, of another user or of another version: the daemons' answers remain.
    Raises Unreachable if it is to be changed, and several autopilots share it, and etcd does not answer."""
    async with contextlib.AsyncExitStack() as stack:
        store = None
        if folder is not None:
            from migrator.autopilot.store import Store

            with contextlib.suppress(SnapshotError):
                store = await stack.enter_async_context(Store.open(folder))
        if store is not None:
            await state.bring_up_to_date(store, changing=changing)
        yield store


async def known(store: Store | None) -> list[tuple[str, Alarm]]:
    """The alarms with their source: autopilot, jobs or webhook."""
    if store is None:
        return []
    found = await store.own_alarms()
    return [(source, one) for source, one in found if source != "jobs" or store.now() - one.last_unix_s < OLD_S]
