"""Ctrl-C and SIGTERM during a move, or while a job is suspended or resumed.

The first one goes to the driver, which undoes what it does before COMMIT and finishes it after COMMIT. The second one exits
at once, and the daemons settle it without a driver.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from migrator.cli import output
from migrator.progress_display import Progress
from snapshotd.api.errors import OutcomeUnknown, Where


class Interrupts:
    """The first one asks the driver to stop, the second one exits. `stopping` and `leaving` say what then happens.
    `on_leave` gets the error with which the second one exits."""

    def __init__(
        self,
        task: asyncio.Task[Any],
        progress: Progress,
        stopping: str,
        leaving: str,
        *,
        as_json: bool,
        on_leave: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.task, self.progress, self.as_json = task, progress, as_json
        self.stopping, self.leaving, self.on_leave = stopping, leaving, on_leave
        self.count = 0

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        self.count += 1
        if self.count > 1:
            self._leave()
        self.progress.say(f"interrupted: {self.stopping}; press Ctrl-C again to exit now and leave it to the daemons")
        self.task.cancel()

    def _leave(self) -> NoReturn:
        self.progress.close()
        error = OutcomeUnknown(self.leaving, where=Where.UNKNOWN)
        output.failure(error, as_json=self.as_json)
        if self.on_leave is not None:
            self.on_leave(output.error_object(error))
        # Not an exception: asyncio.run would wait for the driver's task.
        os._exit(OutcomeUnknown.exit_code)
