"""Shows the progress of a move: a live display on a terminal, plain lines elsewhere, nothing if no output is wanted.

Invariant: the display never disturbs the move. All output goes to one stream (stderr, so that stdout has only the result).
Errors of a closed stream are ignored: a closed terminal must not stop a driver after COMMIT.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from migrator import formatting
from migrator.results import Event

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID

#: The shortest time between two plain lines about a running stream.
LINE_EVERY_S = 2.0


class Progress(Protocol):
    """Receives the driver's events."""

    def __call__(self, event: Event) -> None: ...

    def say(self, text: str) -> None:
        """Prints a line for the user without disturbing the display."""

    def close(self) -> None:
        """Ends the display. Idempotent."""


def show_on(stream: TextIO, *, only_live: bool = False) -> Progress:
    """The display that suits the stream. With `only_live` (--json), a stream that is not a terminal gets no output."""
    if _is_terminal(stream):
        return Live(stream)
    return Silent() if only_live else Lines(stream)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


class Silent:
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """Prints one line per phase, and occasionally one with the bytes sent so far.

    A phase may consist of several steps, each with its own start and end, so its line is printed when another phase starts.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.phase, self.seconds, self.bytes = "", 0.0, 0
        self.ended = False  # the phase's last known step has ended, but its line is not written yet
        self.began_s = self.told_s = clock()

    def __call__(self, event: Event) -> None:
        match event.kind:
            case "phase-start" if event.phase != self.phase:
                self._flush()
                self.phase, self.seconds, self.bytes = event.phase, 0.0, 0
                self.began_s = self.told_s = self.clock()
            case "phase-end":
                self.seconds += event.seconds
                self.bytes += event.bytes
                self.ended = True
            case "bytes" if self.clock() - self.told_s >= LINE_EVERY_S:
                self.told_s = self.clock()
                so_far = formatting.rate(event.bytes, self.told_s - self.began_s)
                of = f" of up to {formatting.size(event.bytes_expected)}" if event.bytes_expected else ""
                self._write(f"  {event.phase:<10} {formatting.size(event.bytes)}{of}  {so_far}".rstrip())
            case "note":
                self.say(event.text)

    def say(self, text: str) -> None:
        self._write(f"  {formatting.plain(text)}")

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self.ended:
            moved = (
                f"  {formatting.size(self.bytes)}  {formatting.rate(self.bytes, self.seconds)}" if self.bytes else ""
            )
            self._write(f"  {self.phase:<10} {formatting.seconds(self.seconds)}{moved}")
        self.ended = False

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(line + "\n")
            self.stream.flush()


class Live:
    """Shows a row with the time of each phase; a phase that moves bytes also has a bar, the bytes and GB/s."""

    def __init__(self, stream: TextIO) -> None:
        # Imported here because rich is slow to load and most verbs have no live display.
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        class Numbers(ProgressColumn):
            def render(self, task: Task) -> Text:
                elapsed = task.fields["seconds"] if task.finished else (task.elapsed or 0.0)
                count = task.fields["bytes"]
                parts = [
                    formatting.seconds(elapsed),
                    formatting.size(count) if count else "",
                    formatting.rate(count, elapsed),
                ]
                return Text("  ".join(part for part in parts if part))

        class BarOfBytes(BarColumn):
            """Shows a bar only for a phase that moves bytes; the others take milliseconds."""

            def render(self, task: Task) -> Text:  # type: ignore[override] # rich accepts any renderable
                return super().render(task) if task.fields["bytes"] else Text("")  # type: ignore[return-value]

        self._display: RichProgress = RichProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarOfBytes(bar_width=24),
            Numbers(),
            console=Console(file=stream),
            refresh_per_second=8,
        )
        self._rows: dict[str, TaskID] = {}
        with contextlib.suppress(OSError, ValueError):
            self._display.start()

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(OSError, ValueError):
            match event.kind:
                case "phase-start":
                    self._row(event.phase)
                case "bytes":
                    row = self._row(event.phase)
                    total = max(event.bytes, event.bytes_expected, 1)
                    self._display.update(row, total=total, completed=min(event.bytes, total - 1), bytes=event.bytes)
                case "phase-end":
                    row = self._row(event.phase)
                    fields = next(task for task in self._display.tasks if task.id == row).fields
                    self._display.update(
                        row,
                        total=1,
                        completed=1,
                        seconds=fields["seconds"] + event.seconds,
                        bytes=max(fields["bytes"], event.bytes),
                    )
                case "note":
                    self.say(event.text)

    def _row(self, phase: str) -> TaskID:
        """The phase's row. A phase with several steps (prepare has two) keeps one row."""
        if phase not in self._rows:
            self._rows[phase] = self._display.add_task(phase, total=None, seconds=0.0, bytes=0)
        return self._rows[phase]

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._display.console.print(formatting.plain(text), markup=False, highlight=False)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._display.stop()
