"""Ends the home keepers of ranks that were given up while they were suspended: their launchers wait for them.

Invariant: what is needed for that is on the disk, beside the journal of the rank's suspension, before its image is dropped,
and stays there until the home node has answered. A restarted daemon goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL

from snapshotd.api.errors import Damaged
from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import description
from snapshotd.moves.jobs import stored
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.sync import sync_folder

log = logging.getLogger(__name__)

FILE = "home-keeper.json"


@dataclass(frozen=True)
class HomeKeeper:
    """Where the home keeper of a rank is, and the keys with which this node may speak for the rank."""

    node: str
    endpoint: str
    keys: list[str]


class HomeKeepers:
    """One instance per daemon. `report` tells the home keeper of a rank how the rank ended, and tries until it answers."""

    def __init__(self, journal: Journal, report: Callable[[RankEntry, int], Awaitable[None]]) -> None:
        self.journal, self._report = journal, report
        self._tasks: set[asyncio.Task[None]] = set()

    def remember(self, images: Path, move_log: MoveLog, ended: str = "") -> None:
        """Before the image is dropped: keeps what `end` needs. `ended`: the records that have ended copies of the rank since
        the image was made. Blocking."""
        try:
            found = description.decode((images / description.FILE).read_bytes())
        except (OSError, Damaged) as error:
            log.error("the keeper of rank %s is not told that it was given up: %s", move_log.begin.rank_uid, error)
            return
        keys = relay_keys.come_back(found.relay_key, found.relay_keys, ended)
        keeper = HomeKeeper(found.home_node, found.home_endpoint, keys)
        stored.write(move_log.folder / FILE, json.dumps(asdict(keeper)).encode())
        sync_folder(move_log.folder)

    def end(self, move_log: MoveLog) -> None:
        """Has the home keeper end as if the rank were killed, in the background."""
        task = asyncio.create_task(self._end(move_log), name=f"end the keeper of {move_log.begin.rank_uid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def adopt(self) -> None:
        """At start: goes on with those that have not been told."""
        for move_log in self.journal.all():
            if (
                move_log.begin.role == "source"
                and move_log.begin.coordinator
                and move_log.committed
                and (move_log.folder / FILE).exists()
            ):
                self.end(move_log)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, move_log: MoveLog) -> None:
        path = move_log.folder / FILE
        try:
            keeper = HomeKeeper(**json.loads(await in_thread(path.read_bytes)))
        except (OSError, ValueError, TypeError) as error:
            log.error("the keeper of rank %s is not told that it was given up: %s", move_log.begin.rank_uid, error)
            return
        await self._report(_entry(move_log, keeper), int(SIGKILL))
        await in_thread(path.unlink, missing_ok=True)


def _entry(move_log: MoveLog, keeper: HomeKeeper) -> RankEntry:
    """The rank as the registry would have it if it were here."""
    begin = move_log.begin
    entry = RankEntry(
        uid=begin.rank_uid,
        job=begin.job,
        rank=begin.rank,
        role="guest",
        keeper_pid=0,
        keeper_start_ticks=0,
        cgroup="",
        home_node=keeper.node,
        home_endpoint=keeper.endpoint,
        relay_key=keeper.keys[0],
        boot_id=host.boot_id(),
        user_id=begin.user_id,
    )
    relay_keys.take_over(entry, keeper.keys)
    return entry
