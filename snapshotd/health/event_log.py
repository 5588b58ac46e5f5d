"""Keeps events and latched alarms on disk: STATE_DIR/health.log, one JSON object per line.

Invariant: what a reader was told under (epoch, sequence) never changes. An event is on disk before it is shown. If the disk
does not take it (a full or read-only file system is one of the things that are reported here), the events continue in memory
under a new epoch, which reaches the disk as soon as it takes a whole file again. A daemon that is restarted before that
continues the old epoch, under which no reader was shown anything else.

The first line has the epoch, and the alarms as they were after the event `through`. The events follow; those up to `through`
are only kept for readers. When there are too many, the file is replaced by a shorter one.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from snapshotd.health import alarms as rules
from snapshotd.health.alarms import MAX_ALARMS, Alarm, Alarms, Event, Kind, Signal

log = logging.getLogger(__name__)

FILE = "health.log"
#: So many events are kept. The file is replaced when it has a quarter more.
KEPT_EVENTS = 4000


class _Header(msgspec.Struct):
    epoch: str
    through: int
    alarms: list[Alarm]


class State(msgspec.Struct, frozen=True):
    """All that a reader can see. It is replaced as a whole."""

    epoch: str
    sequence: int = 0  # of the last event
    events: tuple[Event, ...] = ()
    alarms: Alarms = {}


class EventLog:
    """The methods block, and must not run at the same time. `state` may be read at any time."""

    def __init__(self, state_dir: Path, kept_events: int = KEPT_EVENTS) -> None:
        self.path = state_dir / FILE
        self._kept_events = kept_events
        self._disk_epoch = ""
        self._whole = False  # whether the file has all of `state`, so that lines can be appended
        self.state = State(secrets.token_hex(8))
        try:
            self.state, self._whole = _read(self.path)
            self._disk_epoch = self.state.epoch
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.error("the health log cannot be read, a new one begins: %s: %s", self.path, error)
        self.retry()

    def add(self, signals: Sequence[Signal], now_unix_s: float) -> list[Event]:
        """Latches alarms. The events that result, which readers can see now."""
        alarms = dict(self.state.alarms)
        added: list[Event] = []
        for signal in signals:
            key = signal.check[: rules.MAX_NAME_CHARS], signal.subject[: rules.MAX_NAME_CHARS]
            if key not in alarms and len(alarms) >= MAX_ALARMS:
                log.warning("%s: %s: no alarm is raised, because there are %d already", *key, MAX_ALARMS)
                continue
            alarm, kind = rules.after(signal, alarms.get(key), now_unix_s)
            alarms[key] = alarm
            if kind is not None:
                sequence = self.state.sequence + len(added) + 1
                added.append(Event(sequence, now_unix_s, kind, alarm, alarm.text, signal.value))
        self._continue(added, alarms)
        return added

    def clear(self, check: str, subject: str, by: str, now_unix_s: float) -> list[Alarm]:
        """Ends the matching alarms. Returns them."""
        cleared = rules.matching(self.state.alarms, check, subject)
        text = f"cleared by {by}"[: rules.MAX_TEXT_CHARS]
        added = [
            Event(self.state.sequence + number, now_unix_s, Kind.CLEARED, alarm, text)
            for number, alarm in enumerate(cleared, start=1)
        ]
        self._continue(added, rules.replayed(self.state.alarms, added))
        return cleared

    def retry(self) -> None:
        """Writes the file unless the disk has it."""
        if not self._whole:
            try:
                self._replace(self.state)
            except OSError as error:
                log.warning("the health log cannot be written: %s: %s", self.path, error.strerror)

    def _continue(self, added: list[Event], alarms: Alarms) -> None:
        """Shows the new state, once it is on disk."""
        if not added:  # counts of alarms have changed: these reach the disk with the next event
            self.state = msgspec.structs.replace(self.state, alarms=alarms)
            return
        events = (*self.state.events, *added)
        shorten = len(events) > self._kept_events * 5 // 4
        if shorten:
            events = events[-self._kept_events :]
        after = State(self.state.epoch, added[-1].sequence, events, alarms)
        try:
            if self._whole and not shorten:
                _append_durably(self.path, _lines(added))
            else:
                self._replace(after)
        except OSError as error:
            self._whole = False
            if after.epoch == self._disk_epoch:
                after = msgspec.structs.replace(after, epoch=secrets.token_hex(8))
                log.error(
                    "the health log cannot be written (%s: %s); alarms are kept in memory until it can",
                    self.path,
                    error.strerror,
                )
        self.state = after

    def _replace(self, state: State) -> None:
        """Raises OSError; then the old file is still there."""
        header = msgspec.json.encode(_Header(state.epoch, state.sequence, list(state.alarms.values())))
        new = self.path.with_suffix(".new")
        with open(new, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(header + b"\n" + _lines(state.events))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)
        self._disk_epoch = state.epoch
        _sync_folder(self.path.parent)
        self._whole = True


def _read(path: Path) -> tuple[State, bool]:
    """What is in the file, and whether its last line is complete. Raises OSError, ValueError, TypeError."""
    *complete, rest = path.read_bytes().split(b"\n")
    if not complete:
        raise ValueError("it is empty")
    header = msgspec.json.decode(complete[0], type=_Header)
    events = [msgspec.json.decode(line, type=Event) for line in complete[1:]]
    numbers = [event.sequence for event in events]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ValueError("the numbers of its events have gaps")
    latched = {alarm.key: alarm for alarm in header.alarms}
    alarms = rules.replayed(latched, (event for event in events if event.sequence > header.through))
    return State(header.epoch, max([header.through, *numbers]), tuple(events), alarms), not rest


def _lines(events: Sequence[Event]) -> bytes:
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def _append_durably(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
