"""Reports a move while it runs: events for the command line, and the time of each phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from migrator.results import Event, PhaseTime

#: Makes a span of a trace: its name, and the phase that it is part of.
SpanOf = Callable[[str, str], contextlib.AbstractContextManager[None]]


def note(text: str) -> Event:
    """An event with a message for the operator."""
    return Event("note", "", 0, 0, 0, text)


class Reporter:
    """Times the phases of a move and passes them to `on_event`."""

    def __init__(self, on_event: Callable[[Event], None], span: SpanOf | None = None) -> None:
        self.on_event = on_event
        self.tracing = span is not None
        self.span: SpanOf = span or (lambda _name, _phase: contextlib.nullcontext())
        self.phases: list[PhaseTime] = []
        self.bytes_sent = 0

    @contextlib.contextmanager
    def phase(self, name: str, step: str) -> Iterator[None]:
        """What happens inside is a step of this phase."""
        began, before = time.monotonic(), self.bytes_sent
        self._emit("phase-start", name)
        try:
            with self.span(step, name):
                yield
        finally:
            seconds, moved = time.monotonic() - began, self.bytes_sent - before
            if self.phases and self.phases[-1].name == name:
                self.phases[-1].seconds += seconds
                self.phases[-1].bytes += moved
            else:
                self.phases.append(PhaseTime(name, seconds, moved))
            self._emit("phase-end", name, seconds=seconds, bytes_=moved)

    def sent(self, phase: str, bytes_: int, expected: int) -> None:
        self.bytes_sent = bytes_
        self._emit("bytes", phase, bytes_=bytes_, expected=expected)

    def note(self, text: str) -> None:
        self.on_event(note(text))

    def _emit(self, kind: str, phase: str = "", *, seconds: float = 0, bytes_: int = 0, expected: int = 0) -> None:
        self.on_event(Event(kind, phase, seconds, bytes_, expected, ""))
