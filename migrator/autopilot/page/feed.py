"""What the page shows now, kept for all its viewers at once.

Invariant: the cost for the autopilot does not depend on the number of viewers. One task reads the store and the world, at
most every `LEAST_S`, and only while the page is open somewhere. Viewers wait for it and read only what it keeps in memory.

The store is asked for new records, because other processes write to it too: `migrator drain` and the other verbs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from sqlite3 import DatabaseError
from typing import Any

import msgspec

from migrator.autopilot.pace import Pace
from migrator.autopilot.page import jobs, view
from migrator.autopilot.page.tally import Tally
from migrator.autopilot.policy import Spares
from migrator.autopilot.store import Store
from migrator.autopilot.world import World

log = logging.getLogger(__name__)

#: How long a change can stay unnoticed. A record of this process is noticed at once.
LOOK_S = 1.0
#: Between two looks; and so many times as long as a look takes, because a look at a large cluster is work for the autopilot.
LEAST_S, LEAST_FACTOR = 0.2, 4.0
#: Records that are kept for viewers. One who missed more is told to read the timeline again.
KEPT = 500
#: Views of jobs that are kept.
KEPT_JOBS = 64
#: After so long without news a comment is sent, so that proxies keep the connection open and a lost viewer is noticed.
QUIET_S = 15.0


class Feed:
    """`world` is what the engine knows; `phases` are those of its moves; `notices` are shown before the alerts; `pace` is
    that of a job, by its key."""

    def __init__(
        self,
        store: Store,
        world: Callable[[], Awaitable[World]],
        spares: Spares,
        phases: view.Phases,
        notices: Callable[[], dict[str, str]] = dict,
        pace: Callable[[str], Pace | None] = lambda job: None,
    ) -> None:
        self.store, self.world, self._spares, self._phases = store, world, spares, phases
        self._notices, self._pace = notices, pace
        self._jobs: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # what was shown, and when
        self._tally, self._nodes = Tally(store), view.Nodes()
        self.body, self.etag = b"{}", ""
        self._compressed = ("", b"")  # an etag and its body
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._latest = 0
        self._wake = asyncio.Event()
        self._viewers: set[asyncio.Event] = set()
        self._looking, self._compressing = asyncio.Lock(), asyncio.Lock()
        self._looked_s, self._looked_at = float("-inf"), World({})
        self._pause_s = LEAST_S
        self.closed = False

    def wake(self) -> None:
        """Something was recorded."""
        self._wake.set()

    def close(self) -> None:
        """Ends the streams of all viewers."""
        self.closed = True
        self._tell()

    def _tell(self) -> None:
        for viewer in self._viewers:
            viewer.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._wake.clear()
            try:
                if self._viewers:
                    await self.look(0.0)
            except DatabaseError as error:
                log.warning("the page could not be brought up to date: %s", error)
            await asyncio.sleep(self._pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    async def look(self, age_s: float | None = None) -> None:
        """Makes sure that what is kept is not older than that, and tells the viewers if something is new."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_s <= (self._pause_s if age_s is None else age_s):
                return
            before, self._looked_s = (self.etag, self._latest), now
            last = await self.store.last_event()
            if last > self._latest:
                new = await self.store.events(max(self._latest, last - KEPT), KEPT)
                self._recent.extend(view.line(record) for record in new)
                self._latest = last if not new else new[-1].id
            world = self._looked_at = await self.world()
            self._phases.keep({move.id for move in world.running})
            alerts = {**self._notices(), **await self.store.alerts()}
            headline = await self._tally.headline()
            began_s = time.monotonic()
            shown = view.state(world, alerts, self._spares, self._phases, self._nodes)
            self.body = msgspec.json.encode({**shown, "report": headline})
            self.etag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'
            self._pause_s = min(LOOK_S, max(LEAST_S, LEAST_FACTOR * (time.monotonic() - began_s)))
            if before != (self.etag, self._latest):
                self._tell()

    async def job(self, key: str, find: str) -> bytes:
        """One job, at most LOOK_S old. `find` limits its ranks (jobs.py)."""
        await self.look()
        now, kept = time.monotonic(), self._jobs.get((key, find))
        if kept is None or now - kept[0] > LOOK_S:
            world = self._looked_at
            records = self._tally.records.of(key, (rank.uid for rank in world.ranks_of(key)))
            shown = jobs.job(key, find, world, self._pace(key), self._tally.interruptions(key), records)
            kept = self._jobs[key, find] = now, msgspec.json.encode(shown)
            self._jobs.move_to_end((key, find))
            if len(self._jobs) > KEPT_JOBS:
                self._jobs.popitem(last=False)
        return kept[1]

    async def compressed(self) -> bytes:
        """The body, compressed once for all viewers, and not on the event loop: it is large in a large cluster."""
        etag, body = self.etag, self.body
        async with self._compressing:
            if self._compressed[0] != etag:
                self._compressed = etag, await asyncio.to_thread(gzip.compress, body, 5)
            return self._compressed[1]

    async def stream(self, after: int) -> AsyncIterator[str]:
        """Server-sent events: "records" with the new ones after that number, and "state" when the state has changed."""
        with self._viewing() as news:
            await self.look()
            sent = ""
            yield "retry: 2000\n\n"
            while not self.closed:
                news.clear()
                if self._latest > after:
                    records = [one for one in self._recent if one["id"] > after]
                    skipped = not records or records[0]["id"] != after + 1
                    after = self._latest
                    yield _message("records", {"records": records, "skipped": skipped}, after)
                if self.etag != sent:
                    sent = self.etag
                    yield _message("state", {"etag": sent})
                try:
                    async with asyncio.timeout(QUIET_S):
                        await news.wait()
                    quiet = False
                except TimeoutError:
                    quiet = True
                if quiet:
                    yield ": no news\n\n"

    @contextlib.contextmanager
    def _viewing(self) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        self._viewers.add(news)
        self._wake.set()
        try:
            yield news
        finally:
            self._viewers.discard(news)


def _message(name: str, data: dict[str, Any], number: int | None = None) -> str:
    """JSON has no line breaks, so one line of data is enough."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {name}\ndata: {msgspec.json.encode(data).decode()}\n\n"
