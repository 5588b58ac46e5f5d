"""Alarms are latched across restarts, and events are told once, in order, whatever happens to the daemon or its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.health.alarms import MAX_ALARMS, REPEAT_S, Kind, Severity, Signal
from snapshotd.health.event_log import FILE, EventLog


def signal(
    check: str = "gpu-ecc", subject: str = "gpu:1", severity: Severity = Severity.WARNING, text: str = "3 errors"
) -> Signal:
    return Signal(check, subject, severity, text, "replace it", 3.0)


def test_an_alarm_is_raised_once_and_then_repeated_seldom(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    assert [event.kind for event in log.add([signal()], 1000.0)] == [Kind.RAISED]
    assert log.add([signal()], 1001.0) == []
    assert [event.kind for event in log.add([signal()], 1000.0 + REPEAT_S)] == [Kind.REPEATED]
    (alarm,) = log.state.alarms.values()
    assert (alarm.count, alarm.since_unix_s, alarm.last_unix_s) == (3, 1000.0, 1000.0 + REPEAT_S)


def test_an_alarm_that_gets_worse_is_raised_again_and_never_gets_better(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add([signal()], 1000.0)
    (worse,) = log.add([signal(severity=Severity.CRITICAL, text="lost")], 1001.0)
    assert (worse.kind, worse.alarm.severity, worse.text) == (Kind.RAISED, Severity.CRITICAL, "lost")
    assert log.add([signal()], 1002.0) == []
    (alarm,) = log.state.alarms.values()
    assert (alarm.severity, alarm.text) == (Severity.CRITICAL, "lost")


def test_a_clock_that_was_set_back_does_not_silence_an_alarm(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add([signal()], 100_000.0)
    assert [event.kind for event in log.add([signal()], 500.0)] == [Kind.REPEATED]


def test_a_restart_keeps_alarms_events_and_numbers(tmp_path: Path) -> None:
    before = EventLog(tmp_path)
    before.add([signal(), signal(subject="gpu:2")], 1000.0)
    after = EventLog(tmp_path)
    assert after.state == before.state
    assert [event.sequence for event in after.add([signal(check="other")], 1001.0)] == [3]


def test_a_cleared_alarm_stays_cleared_and_can_be_raised_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add([signal(), signal(subject="gpu:2")], 1000.0)
    assert [alarm.subject for alarm in log.clear("gpu-ecc", "gpu:1", "operator alice", 1001.0)] == ["gpu:1"]
    again = EventLog(tmp_path)
    assert list(again.state.alarms) == [("gpu-ecc", "gpu:2")]
    assert (again.state.events[-1].kind, again.state.events[-1].text) == (Kind.CLEARED, "cleared by operator alice")
    assert [event.kind for event in again.add([signal()], 1002.0)] == [Kind.RAISED]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    EventLog(tmp_path).add([signal(), signal(subject="gpu:2")], 1000.0)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-7])
    log = EventLog(tmp_path)
    assert [event.sequence for event in log.state.events] == [1]
    assert [event.sequence for event in log.add([signal(subject="gpu:3")], 1001.0)] == [2]
    assert EventLog(tmp_path).state == log.state


def test_a_file_that_cannot_be_read_begins_a_new_epoch(tmp_path: Path) -> None:
    old = EventLog(tmp_path)
    (tmp_path / FILE).write_bytes(b"nothing\n")
    new = EventLog(tmp_path)
    assert new.state.epoch != old.state.epoch
    assert new.state.events == ()


def test_old_events_are_pruned_and_alarms_stay(tmp_path: Path) -> None:
    log = EventLog(tmp_path, kept_events=8)
    log.add([signal(check="first")], 1000.0)
    for number in range(30):
        log.add([signal(subject=f"gpu:{number}")], 1000.0)
        log.clear("gpu-ecc", f"gpu:{number}", "operator alice", 1000.0)
    assert 8 <= len(log.state.events) <= 10
    again = EventLog(tmp_path, kept_events=8)
    assert again.state == log.state
    assert list(again.state.alarms) == [("first", "gpu:1")]
    assert (tmp_path / FILE).read_bytes().count(b"\n") <= 11


def test_a_disk_that_takes_nothing_begins_a_new_epoch_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event may be shown under an epoch whose events a restart would number differently."""
    log = EventLog(tmp_path)
    log.add([signal()], 1000.0)
    durable, path = log.state, log.path
    log.path = tmp_path / "gone" / FILE  # as on a disk that cannot be written
    log.add([signal(subject="gpu:2")], 1001.0)
    volatile = log.state
    assert volatile.epoch != durable.epoch
    assert [event.sequence for event in volatile.events] == [1, 2]
    log.add([signal(subject="gpu:3")], 1002.0)
    assert log.state.epoch == volatile.epoch, "it changes once"
    assert EventLog(tmp_path).state == durable
    log.path = path
    log.retry()
    assert EventLog(tmp_path).state == log.state
    assert log.state.epoch == volatile.epoch


def test_alarms_and_texts_are_limited(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add([signal(subject=f"s{number}", text="x" * 10_000) for number in range(MAX_ALARMS + 5)], 1000.0)
    assert len(log.state.alarms) == MAX_ALARMS
    assert max(len(alarm.text) for alarm in log.state.alarms.values()) == 500
    assert EventLog(tmp_path).state == log.state
