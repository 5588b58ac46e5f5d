"""Answers what operators and other programs ask about the health of this node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.health.alarms import Event, Severity, Signal
from snapshotd.health.event_log import KEPT_EVENTS, EventLog
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: How long a caller may wait for an event, and how many it gets at once.
MAX_WAIT_S = 30.0
PAGE_EVENTS = 500
_LEVEL = {Severity.NOTICE: logging.INFO, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}


class Monitor:
    """The health of this node. One per daemon."""

    def __init__(self, node: str, state_dir: Path, kept_events: int = KEPT_EVENTS) -> None:
        self._node = node
        self._log = EventLog(state_dir, kept_events)
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()  # replaced at each change

    async def since(self, request: pb.GetHealthRequest) -> pb.Health:
        """Alarms, checks, and the events after those that the caller knows. Waits for one if it asks for that."""
        ends = time.monotonic() + min(max(request.wait_s, 0.0), MAX_WAIT_S)
        while request.epoch == self._log.state.epoch and request.after >= self._log.state.sequence:
            changed, left_s = self._changed, ends - time.monotonic()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                break
        return self._answer(request.after if request.epoch == self._log.state.epoch else 0)

    def _answer(self, after: int) -> pb.Health:
        state = self._log.state
        first = state.events[0].sequence if state.events else state.sequence + 1
        page = state.events[max(0, after + 1 - first) :][:PAGE_EVENTS]
        last = page[-1].sequence if page else state.sequence
        return pb.Health(
            node=self._node,
            epoch=state.epoch,
            sequence=last,
            alarms=[alarm.message() for _, alarm in sorted(state.alarms.items())],
            events=[event.message() for event in page],
            more=last < state.sequence,
            pruned=first > after + 1,
        )

    async def clear(self, request: pb.ClearAlarmsRequest, by: str) -> pb.ClearAlarmsReply:
        """Ends alarms, and records who asked for it."""
        if not (request.check or request.subject or request.all):
            raise Usage("no alarm was named", remedy="name a check, a subject, or all alarms")
        if request.all and (request.check or request.subject):
            raise Usage("all alarms and certain ones were named", remedy="name one of both")
        async with self._writing:
            cleared = await in_thread(self._log.clear, request.check, request.subject, by, time.time())
        self._tell()
        for alarm in cleared:
            log.info("alarm %s of %s was cleared by %s: %s", alarm.check, alarm.subject, by, alarm.text)
        return pb.ClearAlarmsReply(cleared=[alarm.message() for alarm in cleared])

    async def report(self, signals: Sequence[Signal]) -> list[Event]:
        """Latches the alarms of these signals."""
        async with self._writing:
            events = await in_thread(self._log.add, signals, time.time())
        self._tell()
        for event in events:
            alarm = event.alarm
            log.log(_LEVEL[alarm.severity], "alarm %s of %s: %s", alarm.check, alarm.subject, event.text)
        return events

    def _tell(self) -> None:
        """Ends the waiting of callers."""
        self._changed.set()
        self._changed = asyncio.Event()
