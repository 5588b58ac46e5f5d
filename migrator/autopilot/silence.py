"""Finds out whether a node that does not answer is silent for others too.

Invariant: a node counts as unreachable only if at least two other nodes cannot reach its daemon either and none can. A node
that only this machine cannot reach is not in trouble; the connection is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from migrator.autopilot.model import Alarm, Severity
from migrator.autopilot.store import Store
from migrator.autopilot.watcher import Watcher
from migrator.cluster import Cluster
from migrator.death import ask_others
from snapshotd.api.errors import Timeout, Unreachable

CHECK = "daemon-unreachable"
WITNESSES = 2
#: How many nodes are asked, and how often.
ASKED = 5
EVERY_S = 30.0


class Silence:
    """Asks other nodes about silent ones, and raises or clears the alarm about them."""

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self.cluster, self.store = cluster, store
        self._asked: dict[str, float] = {}  # when others were asked about a silent node, monotonic
        self._calm: set[str] = set()  # nodes that answer and about which no alarm is left, also from before a restart

    async def look(self, watchers: Mapping[str, Watcher], after_s: float) -> None:
        answering = [name for name, watcher in watchers.items() if watcher.error is None and watcher.sighting]
        for name, watcher in watchers.items():
            if watcher.error is None:
                if watcher.sighting is not None and name not in self._calm:
                    await self.store.set_own_alarm(name, None)
                    self._calm.add(name)
                continue
            self._calm.discard(name)
            if (
                isinstance(watcher.error, Unreachable | Timeout)
                and watcher.silent_s >= after_s
                and time.monotonic() - self._asked.get(name, -EVERY_S) >= EVERY_S
            ):
                self._asked[name] = time.monotonic()
                await self._ask(name, watcher, answering[:ASKED])

    async def _ask(self, name: str, watcher: Watcher, others: list[str]) -> None:
        answers = await ask_others(self.cluster, name, others)
        seeing = [other for other, answer in answers.items() if answer.daemon_answers]
        blind = [other for other in answers if other not in seeing]
        if seeing or len(blind) < WITNESSES:
            await self.store.set_own_alarm(name, None)
            return
        now = self.store.now()
        stored = await self.store.load(now)
        if any(alarm.node == name and alarm.check == CHECK for alarm in stored.alarms):
            return
        text = f"its daemon does not answer, and {', '.join(blind)} cannot reach it either"
        began = now - watcher.silent_s
        await self.store.set_own_alarm(name, Alarm(name, CHECK, "host", Severity.CRITICAL, text, began, now))
