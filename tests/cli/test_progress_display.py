"""Tests how `migrator move` shows its progress: live on a terminal, as lines elsewhere, not at all for JSON."""

from __future__ import annotations

import io
import os

import pytest

from migrator.progress_display import Lines, Live, Silent, show_on
from migrator.results import Event


def event(kind: str, phase: str = "", seconds: float = 0, count: int = 0, expected: int = 0, text: str = "") -> Event:
    return Event(kind, phase, seconds, count, expected, text)


def test_plain_lines_report_a_stream_at_most_every_two_seconds() -> None:
    clock = [0.0]
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: clock[0])
    lines(event("phase-start", "stream"))
    for tick in range(1, 46):
        clock[0] = tick / 10
        lines(event("bytes", "stream", count=tick * 100_000_000, expected=8_000_000_000))
    lines(event("phase-end", "stream", 4.5, 4_500_000_000))
    lines.close()
    lines.close()
    assert stream.getvalue().splitlines() == [
        "  stream     2.0 GB of up to 8.0 GB  1.00 GB/s",
        "  stream     4.0 GB of up to 8.0 GB  1.00 GB/s",
        "  stream     4.5 s  4.5 GB  1.00 GB/s",
    ]


def test_phase_of_two_steps_is_one_line() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for phase in ("prepare", "prepare", "freeze"):
        lines(event("phase-start", phase))
        lines(event("phase-end", phase, 0.2))
    lines(event("note", text="hello\x1b[2J"))
    lines.close()
    assert stream.getvalue().splitlines() == ["  prepare    0.4 s", "  hello?[2J", "  freeze     0.2 s"]


def test_closed_output_stream_is_ignored() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    closed = io.StringIO()
    closed.close()
    for stream in (broken, closed):
        lines = Lines(stream)
        lines(event("phase-start", "freeze"))
        lines(event("phase-end", "freeze", 0.1))
        lines.close()
    with pytest.raises(BrokenPipeError):
        broken.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_is_live_on_a_terminal_and_absent_for_json() -> None:
    assert isinstance(show_on(io.StringIO()), Lines)
    assert isinstance(show_on(io.StringIO(), only_live=True), Silent)
    stream = Terminal()
    live = show_on(stream)
    assert isinstance(live, Live)
    for phase in ("prepare", "prepare", "stream"):
        live(event("phase-start", phase))
        live(event("bytes", phase, count=1_000_000_000 * (phase == "stream"), expected=4_000_000_000))
        live(event("phase-end", phase, 0.5, 3_000_000_000 * (phase == "stream")))
    live(event("note", text="a note [red]"))
    live.close()
    live.close()
    shown = stream.getvalue()
    assert "3.0 GB  6.00 GB/s" in shown
    assert "1.0 s" in shown  # both steps of prepare
    assert "a note [red]" in shown
