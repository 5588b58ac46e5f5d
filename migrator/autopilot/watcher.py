"""Follows one node: its health by long polls, and its GPUs and ranks after each of them.

Invariant: nothing is concluded here. A watcher only keeps what the node said last, when, and since when it is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from migrator import rollbacks
from migrator.autopilot import convert
from migrator.autopilot.model import Node, Rank
from migrator.autopilot.rollbacks import is_sane
from migrator.autopilot.store import Store
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError

log = logging.getLogger(__name__)

#: How long one poll waits for an event. GPUs and ranks are looked at at least that often.
POLL_S = 10.0
CALL_S = 10.0
RETRY_S = 2.0
#: Between two polls, so that a node with many events does not keep the autopilot busy.
LEAST_S = 0.1
#: What is recorded of one node, and how often its news are looked at: so much at once (a daemon keeps 4,000 events), then so
#: much in an hour. The log is never shortened, so a node that reports without end must not fill the disk.
BURST, AN_HOUR = 6000, 120
#: Between two polls of a node that has used that up.
SLOW_S = 60.0


@dataclass(frozen=True)
class Sighting:
    """What a node said, and when it was asked."""

    node: Node
    ranks: tuple[Rank, ...]
    asked_unix_s: float


class Allowance:
    """How much a node may still have recorded."""

    def __init__(self) -> None:
        self._left, self._since_s = float(BURST), time.monotonic()

    def take(self, count: int) -> bool:
        """False if that much is not left; then nothing is taken. A negative count gives back."""
        now_s = time.monotonic()
        self._left = min(float(BURST), self._left + (now_s - self._since_s) * AN_HOUR / 3600)
        self._since_s = now_s
        if count > self._left:
            return False
        self._left -= count
        return True


class Watcher:
    """One node. `changed` is called when something new is known. With `records` false, another autopilot records events."""

    def __init__(
        self, cluster: Cluster, node: str, store: Store, changed: Callable[[], None], *, records: bool = True
    ) -> None:
        self.cluster, self.node, self.store, self._changed, self._records = cluster, node, store, changed, records
        self.sighting: Sighting | None = None
        self.error: SnapshotError | None = None
        self.silent_since: float | None = None  # monotonic
        self._look_now = asyncio.Event()
        self._allowance = Allowance()
        self._is_flood = False  # it has used up what it may have recorded
        self._rollbacks_s = 0.0  # when it was last asked for rollbacks

    @property
    def silent_s(self) -> float:
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def look_now(self) -> None:
        """Ends the current poll, so that the node's ranks are looked at."""
        self._look_now.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async with self.cluster.client(self.node) as client:
                    wait_s = 0.0  # the first answer is needed at once
                    while True:
                        await self._once(client, wait_s)
                        wait_s = POLL_S
                        await asyncio.sleep(SLOW_S if self._is_flood else LEAST_S)
            except SnapshotError as error:
                if self.error is None:
                    self.silent_since = time.monotonic()
                self.error = error
                self._changed()
            await asyncio.sleep(RETRY_S)

    async def _once(self, client: DaemonClient, wait_s: float) -> None:
        news = await self._poll(client, wait_s)
        self._look_now.clear()
        asked = self.store.now()
        info, ranks = await asyncio.gather(
            client.node.GetNode(pb.GetNodeRequest(), timeout_s=CALL_S),
            client.node.ListRanks(pb.ListRanksRequest(), timeout_s=CALL_S),
        )
        labels = self.cluster.labels.get(self.node, {})
        seen = Sighting(convert.node(self.node, labels, info), convert.ranks(self.node, ranks), asked)
        await self._record_rollbacks(client)
        before, self.sighting = self.sighting, seen
        returned, self.error, self.silent_since = self.error is not None, None, None
        if news or returned or before is None or before.ranks != seen.ranks or before.node != seen.node:
            self._changed()

    async def _poll(self, client: DaemonClient, wait_s: float) -> bool:
        """Records new events. Returns whether there were any, or an alarm changed."""
        if not self._records:
            await self._pause(wait_s)
            return False
        news = False
        while True:
            epoch, sequence = await self.store.cursor(self.node)
            request = pb.GetHealthRequest(epoch=epoch, after=sequence, wait_s=wait_s)
            try:
                reply = await self._unless_needed(client.node.GetHealth(request, timeout_s=wait_s + CALL_S))
            except UnknownMethod:  # a daemon without health: its ranks can still be moved
                reply = None
                await self._pause(wait_s)
            if reply is None:
                return news
            report = convert.health(self.node, reply)
            changed = report.epoch != epoch or report.sequence != sequence or bool(report.events)
            flood = changed and not self._allowance.take(1 + len(report.events))
            if flood and not self._is_flood:
                text = "it reports more than can be recorded: its events are left out, and it is asked once a minute"
                await self.store.note("flood", text, node=self.node)
            self._is_flood = flood
            news = await self.store.take_in(report, with_events=not flood) or news
            if flood or not reply.more:
                return news

    async def _record_rollbacks(self, client: DaemonClient) -> None:
        """Records the rollbacks of jobs that this node has coordinated. The daemon keeps them for days."""
        if not self._records or time.monotonic() < self._rollbacks_s + POLL_S:
            return
        self._rollbacks_s = time.monotonic()
        try:
            reply = await rollbacks.listed(client, CALL_S)
        except SnapshotError as error:  # the ranks count more; it is asked again
            log.warning("%s does not list its rollbacks: %s", self.node, error.message)
            return
        new = await self.store.new_rollbacks(self.node, rollbacks.ended(self.node, reply)) if is_sane(reply) else []
        if new and self._allowance.take(len(new)):
            await self.store.record_rollbacks(self.node, new)

    async def _pause(self, wait_s: float) -> None:
        """Until a look at the ranks is needed, but not longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._look_now.wait()

    async def _unless_needed(self, call: Coroutine[Any, Any, pb.Health]) -> pb.Health | None:
        """The answer, or None if a look at the ranks is needed before it arrives. The events arrive with the next poll."""
        poll = asyncio.create_task(call)
        needed = asyncio.create_task(self._look_now.wait())
        try:
            await asyncio.wait({poll, needed}, return_when=asyncio.FIRST_COMPLETED)
            return poll.result() if poll.done() else None
        finally:
            for task in (poll, needed):
                task.cancel()
            await asyncio.gather(poll, needed, return_exceptions=True)


def believed(nodes: Mapping[str, Node], ranks: list[tuple[float, Rank]]) -> tuple[Rank, ...]:
    """What nodes say of their ranks. Each speaks for itself, so a rank that two nodes claim is on both of them: neither can
    hide it from the other, and a move asks the very node that it leaves. But a node that fell silent after a rank has left it
    would list the rank for ever: if another one has answered later, that counts."""
    silent = {name for name, node in nodes.items() if not node.reachable}
    newest: dict[str, float] = {}
    for asked, rank in ranks if silent else ():
        newest[rank.uid] = max(asked, newest.get(rank.uid, 0.0))
    return tuple(rank for asked, rank in ranks if rank.node not in silent or asked >= newest[rank.uid])
