"""Runs the checks, latches what they report, and answers what operators and other programs ask about this node's health.

Invariant: a check that fails affects nothing but itself. While a move is running on this node, nothing is read but the
kernel's log and the clock, so that no reading lengthens the pause of a rank; a move that takes very long does not stop the
checks for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.health import counters_file, every
from snapshotd.health.alarms import Event, Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.event_log import KEPT_EVENTS, EventLog
from snapshotd.health.settings import CHECKS, Settings
from snapshotd.proc import host
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: How long a caller may wait for an event, and how many it gets at once.
MAX_WAIT_S = 30.0
PAGE_EVENTS = 500
#: How long checks wait for moves to end, and how often they look.
MAX_PAUSE_S = 120.0
PAUSE_STEP_S = 0.5
#: How often counters are saved that no alarm depends on yet.
SAVE_S = 60.0
_LEVEL = {Severity.NOTICE: logging.INFO, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}


class Monitor:
    """The health of this node. One per daemon. `moving`: whether a move is running on this node."""

    def __init__(
        self,
        node: str,
        state_dir: Path,
        settings: Settings,
        library_dir: str = "",
        moving: Callable[[], bool] = lambda: False,
        kept_events: int = KEPT_EVENTS,
    ) -> None:
        self._node, self._state_dir, self._settings, self._moving = node, state_dir, settings, moving
        self._log = EventLog(state_dir, kept_events)
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()  # replaced at each change
        self._counters = counters_file.load(state_dir, host.boot_id())
        self._groups = every.groups(settings, library_dir, self._counters)
        self._unable: dict[Group, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._show()

    # ------------------------------------------------------------ checks

    def start(self) -> None:
        for group in self._groups:
            if not set(group.names) or set(group.names) - set(self._settings.off):
                self._tasks.append(asyncio.create_task(self._watch(group), name=f"health: {type(group).__name__}"))
        self._tasks.append(asyncio.create_task(self._keep(), name="health: counters"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            await self._save()
        for group in self._groups:
            await group.close()

    async def _watch(self, group: Group) -> None:
        while True:
            if not group.urgent:
                await self._until_no_move()
            try:
                await self._read(group)
            except Exception:
                log.exception("alarms of %s were not recorded", ", ".join(group.names))
            await asyncio.sleep(group.every_s)

    async def _until_no_move(self) -> None:
        ends = time.monotonic() + MAX_PAUSE_S
        while self._moving() and time.monotonic() < ends:  # noqa: ASYNC110 - moves end in many places
            await asyncio.sleep(PAUSE_STEP_S)

    async def _read(self, group: Group) -> None:
        reason, signals = "", []
        try:
            signals = await group.read(Now.taken())
        except (Unable, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            log.exception("a check failed: %s", ", ".join(group.names))
            reason = f"{type(error).__name__}: {error}"
        if reason != self._unable.get(group, ""):
            log.info("health: %s: %s", ", ".join(group.names), reason or "checked again")
        self._unable[group] = reason
        wanted = [signal for signal in signals if signal.check not in self._settings.off]
        if wanted:
            await self.report(wanted)
            await self._save()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()
            async with self._writing:
                await in_thread(self._log.retry)

    async def _save(self) -> None:
        await in_thread(counters_file.save, self._state_dir, host.boot_id(), dict(self._counters.values))

    def _checks(self) -> list[pb.HealthCheck]:
        names = [*CHECKS, *(name for group in self._groups for name in group.names if name not in CHECKS)]
        return [self._check(name) for name in names]

    def _check(self, name: str) -> pb.HealthCheck:
        """A check that several groups make is unable only if all of them are."""
        if name in self._settings.off:
            return pb.HealthCheck(name=name, state=pb.HealthCheck.OFF, reason="switched off by the configuration")
        of = [group for group in self._groups if name in group.names]
        if not of:
            return pb.HealthCheck(name=name, state=pb.HealthCheck.UNABLE, reason="it is not configured")
        reasons = [group.reasons.get(name) or self._unable.get(group, "") for group in of]
        if all(reasons):
            return pb.HealthCheck(name=name, state=pb.HealthCheck.UNABLE, reason="; ".join(reasons))
        return pb.HealthCheck(name=name, state=pb.HealthCheck.RUNNING)

    # ------------------------------------------------------------ alarms

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
            checks=self._checks(),
        )

    async def clear(self, request: pb.ClearAlarmsRequest, by: str) -> pb.ClearAlarmsReply:
        """Ends alarms, and records who asked for it."""
        if not (request.check or request.subject or request.all):
            raise Usage("no alarm was named", remedy="name a check, a subject, or all alarms")
        if request.all and (request.check or request.subject):
            raise Usage("all alarms and certain ones were named", remedy="name one of both")
        async with self._writing:
            cleared = await in_thread(self._log.clear, request.check, request.subject, by, time.time())
        self._show()
        for alarm in cleared:
            log.info("alarm %s of %s was cleared by %s: %s", alarm.check, alarm.subject, by, alarm.text)
        return pb.ClearAlarmsReply(cleared=[alarm.message() for alarm in cleared])

    async def report(self, signals: Sequence[Signal]) -> list[Event]:
        """Latches the alarms of these signals."""
        async with self._writing:
            events = await in_thread(self._log.add, signals, time.time())
        self._show()
        for event in events:
            alarm = event.alarm
            log.log(_LEVEL[alarm.severity], "alarm %s of %s: %s", alarm.check, alarm.subject, event.text)
        return events

    def _show(self) -> None:
        """Ends the waiting of callers, and updates the metrics."""
        self._changed.set()
        self._changed = asyncio.Event()
        alarms = self._log.state.alarms.values()
        metrics.alarms(Counter((alarm.check, alarm.severity.name.lower()) for alarm in alarms))
