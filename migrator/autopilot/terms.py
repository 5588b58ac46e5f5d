"""One of several autopilots: stands by while another one leads, and leads when there is none.

Invariant: only an engine whose store has the fence of the current term decides or records anything. The term ends as soon as
the lease is not renewed or the store cannot be changed. Then its drivers are cancelled: a move that is not committed is
undone, one that is committed is finished. The next leader finds the intended move, and settles it as after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from migrator.autopilot import database, leader
from migrator.autopilot.chain import Record
from migrator.autopilot.engine import Engine
from migrator.autopilot.facts import AboutRank
from migrator.autopilot.leader import Term
from migrator.autopilot.pace import Pace
from migrator.autopilot.policy import Policy
from migrator.autopilot.shared import TermOver
from migrator.autopilot.store import Store
from migrator.autopilot.world import World
from migrator.cluster import Cluster
from migrator.results import Event
from snapshotd.api.errors import BadConfig, SnapshotError

log = logging.getLogger(__name__)

#: How often etcd is asked who leads, and for changes of others.
POLL_S = 0.5
#: How often the leader looks whether the history is to be shortened.
SHORTEN_S = 20.0
#: Records that are read at a time.
PAGE = 500
#: In this phase of a move daemons hear of it for the first time. From then on their journals know it.
FIRST_PHASE = "prepare"


class Terms:
    """`store` is one without a fence, for viewers and operators. `on_record` gets every record after `last`, once;
    `on_role` what this autopilot does, whether it leads, and whether etcd can be used."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        store: Store,
        last: int,
        *,
        on_phase: Callable[[str, Event], None] = lambda move, event: None,
        on_round: Callable[[World, list[AboutRank], dict[str, str]], None] = lambda world, decided, alerts: None,
        on_record: Callable[[Record], None] = lambda record: None,
        on_role: Callable[[str, bool, bool], None] = lambda role, leads, reachable: None,
    ) -> None:
        assert store.history is not None
        self.cluster, self.policy, self.store, self._history = cluster, policy, store, store.history
        self._on_phase, self._on_round, self._on_record, self._on_role = on_phase, on_round, on_record, on_role
        self.engine = Engine(cluster, policy, store, leads=False)  # the current one
        self.leads, self.trouble = False, ""  # why etcd cannot be used
        self.role = ""
        self._news = asyncio.Event()
        self._last = last  # the record that was delivered last

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises BadConfig if the state in etcd is not the one of this folder."""
        following = asyncio.create_task(self._follow())
        acting = asyncio.create_task(self._act(stop))
        try:
            await asyncio.wait({following, acting}, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                acting.result()
            else:
                following.result()
        finally:
            await _end(acting)
            await self._deliver()  # what the end of the term has recorded
            await _end(following)

    async def _act(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            term = await self._stand_by(stop)
            if term is not None:
                try:
                    await self._lead(term, stop)
                except TermOver as over:
                    self.leads = False
                    self._say(f"does not lead any more: {over}")
                finally:
                    self.leads = False
                    await asyncio.shield(asyncio.to_thread(term.resign))

    # ---------------------------------------------------------------- standing by

    async def _stand_by(self, stop: asyncio.Event) -> Term | None:
        """Returns a term when this process has become the leader."""
        self.engine = Engine(self.cluster, self.policy, self.store, leads=False, on_round=self._round)
        over = asyncio.Event()
        showing = asyncio.create_task(self.engine.follow(over))
        try:
            while not stop.is_set():
                if showing.done():
                    showing.result()
                if not self.trouble:
                    try:
                        elected = await asyncio.to_thread(leader.elect, self._history.etcd, self._history.leader_key)
                        if isinstance(elected, Term):
                            return elected
                        self._say(f"stands by: {elected or 'no autopilot'} leads")
                    except SnapshotError as error:
                        self._say(f"cannot lead: {error.message}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await stop.wait()
            return None
        finally:
            over.set()
            await _end(showing)

    # ---------------------------------------------------------------- leading

    async def _lead(self, term: Term, stop: asyncio.Event) -> None:
        def on_phase(move: str, event: Event) -> None:
            if event.kind == "phase-start" and event.phase == FIRST_PHASE:
                term.must_hold()
            self._on_phase(move, event)

        before = self.engine
        async with Store.open(self.store.folder, self.store.now, fence=term.fence) as store:
            store.on_record = lambda record: self._news.set()
            await _followed(store)
            await store.note("lead", f"{leader.my_name()} leads", nodes=len(self.cluster.nodes))
            self.leads = True
            self._say("leads")
            engine = Engine(self.cluster, self.policy, store, on_phase=on_phase, on_round=self._round)
            engine.take_over(before)
            self.engine = engine
            work = [engine.run(stop), term.keep(), self._shorten(store)]
            await _first(work)

    async def _shorten(self, store: Store) -> None:
        """Keeps the history in etcd short. Until it is cancelled."""
        while True:
            await asyncio.sleep(SHORTEN_S)
            try:
                await asyncio.to_thread(shorten, store)
            except SnapshotError as error:
                log.warning("the history in etcd was not shortened: %s", error.message)

    # ---------------------------------------------------------------- following

    async def _follow(self) -> None:
        """Makes the changes of others here. Until it is cancelled, or this folder is not a copy any more."""
        while True:
            self._news.clear()
            try:
                await self.store.follow()
                if self.trouble:
                    self.trouble = ""
                    self._say("goes on: etcd answers again")
            except BadConfig:
                raise
            except SnapshotError as error:
                if not self.trouble:
                    self.trouble = error.message
                    self._say(f"decides nothing until etcd answers: {error.message}")
            await self._deliver()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()

    async def _deliver(self) -> None:
        while records := await self.store.events(self._last, PAGE):
            for record in records:
                self._last = record.id
                self._on_record(record)

    def _round(self, world: World, decided: list[AboutRank], alerts: dict[str, str]) -> None:
        if not self.trouble:
            self._on_round(world, decided, alerts)

    def _say(self, role: str) -> None:
        if role != self.role:
            self.role = role
            self._on_role(role, self.leads, not self.trouble)

    async def shown_world(self) -> World:
        """For viewers."""
        return await self.engine.shown_world()

    def pace(self, job_key: str) -> Pace | None:
        """How fast a job was during the last minutes, as long as this one leads: only then the nodes are asked."""
        return self.engine.pace(job_key)

    def notices(self) -> dict[str, str]:
        """For the page."""
        if self.trouble:
            return {"etcd": f"nothing is decided: {self.trouble}"}
        return {} if self.leads else {f"this autopilot ({leader.my_name()})": self.role}


def shorten(store: Store) -> None:
    """Blocks."""
    assert store.history is not None
    connection = database.connect(store.folder)
    try:
        if store.history.is_long(connection):
            store.history.shorten(connection)
    finally:
        connection.close()


async def _followed(store: Store) -> None:
    """Nothing is decided before every change of the last term is known here."""
    try:
        await store.follow()
    except SnapshotError as error:
        raise TermOver(error.message) from error


async def _first(work: list[Coroutine[Any, Any, None]]) -> None:
    """Does all of it until the first one ends, and ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(*tasks)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
