"""What a check reports, the alarm that results, and the events about it. Pure: no clock, no files.

Invariant: an alarm is identified by (check, subject). It stays until it is cleared, its severity only rises, and each change
that a reader must know is one event. A cause that is seen again and again is an event once in REPEAT_S, because a reader
wants to know that it persists, not each reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from snapshotd.api import snapshotd_pb2 as pb

REPEAT_S = 300.0
#: Programs of the administrator choose subjects and texts (dropins.py): neither may grow without limit.
MAX_ALARMS = 1000
MAX_TEXT_CHARS = 500
MAX_NAME_CHARS = 128


class Severity(IntEnum):
    """The numbers are those of the .proto."""

    NOTICE = 1
    WARNING = 2
    CRITICAL = 3


class Kind(IntEnum):
    """The numbers are those of the .proto."""

    RAISED = 1
    REPEATED = 2
    CLEARED = 3


class Signal(msgspec.Struct, frozen=True):
    """A check has seen the cause of an alarm."""

    check: str
    subject: str
    severity: Severity
    text: str
    remedy: str = ""
    value: float = 0.0


class Alarm(msgspec.Struct, frozen=True):
    check: str
    subject: str
    severity: Severity
    text: str
    remedy: str
    since_unix_s: float
    last_unix_s: float
    count: int
    told_unix_s: float  # when the last event about it was

    @property
    def key(self) -> tuple[str, str]:
        return self.check, self.subject

    def message(self) -> pb.Alarm:
        return pb.Alarm(
            check=self.check,
            subject=self.subject,
            severity=pb.Severity.ValueType(self.severity),
            text=self.text,
            remedy=self.remedy,
            since_unix_s=self.since_unix_s,
            last_unix_s=self.last_unix_s,
            count=self.count,
        )


class Event(msgspec.Struct, frozen=True):
    """One line of the event log. `alarm` is as it was after the event, or before it was cleared."""

    sequence: int
    unix_s: float
    kind: Kind
    alarm: Alarm
    text: str
    value: float = 0.0

    def message(self) -> pb.HealthEvent:
        return pb.HealthEvent(
            sequence=self.sequence,
            unix_s=self.unix_s,
            kind=pb.HealthEvent.EventKind.ValueType(self.kind),
            check=self.alarm.check,
            subject=self.alarm.subject,
            severity=pb.Severity.ValueType(self.alarm.severity),
            text=self.text,
            value=self.value,
        )


Alarms = dict[tuple[str, str], Alarm]


def after(signal: Signal, before: Alarm | None, now_unix_s: float) -> tuple[Alarm, Kind | None]:
    """The alarm after a signal, and the kind of event that it is; None: nothing that a reader must know."""
    text, remedy = signal.text[:MAX_TEXT_CHARS], signal.remedy[:MAX_TEXT_CHARS]
    if before is None:
        check, subject = signal.check[:MAX_NAME_CHARS], signal.subject[:MAX_NAME_CHARS]
        raised = Alarm(check, subject, signal.severity, text, remedy, now_unix_s, now_unix_s, 1, now_unix_s)
        return raised, Kind.RAISED
    seen = msgspec.structs.replace(before, last_unix_s=now_unix_s, count=before.count + 1)
    worse = signal.severity > before.severity
    if signal.severity >= before.severity:  # the text of the most severe cause stays
        seen = msgspec.structs.replace(seen, severity=signal.severity, text=text, remedy=remedy)
    # A clock that was set back must not silence an alarm.
    if worse or not 0 <= now_unix_s - before.told_unix_s < REPEAT_S:
        return msgspec.structs.replace(seen, told_unix_s=now_unix_s), Kind.RAISED if worse else Kind.REPEATED
    return seen, None


def replayed(alarms: Alarms, events: Iterable[Event]) -> Alarms:
    """The alarms after these events."""
    result = dict(alarms)
    for event in events:
        if event.kind is Kind.CLEARED:
            result.pop(event.alarm.key, None)
        else:
            result[event.alarm.key] = event.alarm
    return result


def matching(alarms: Alarms, check: str, subject: str) -> list[Alarm]:
    """The alarms of a check and a subject. Empty: of any."""
    return [alarm for alarm in alarms.values() if check in ("", alarm.check) and subject in ("", alarm.subject)]
