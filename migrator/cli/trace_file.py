"""The file of `migrator move --trace`. It is opened before the move, and written when the move has ended, however it did."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from migrator.cli import output
from snapshotd.api.errors import Usage

if TYPE_CHECKING:
    from migrator.driver.trace import Trace


class TraceFile:
    """Invariant: a trace that cannot be written changes neither the move nor the exit code."""

    def __init__(self, path: str) -> None:
        """Raises Usage if the file cannot be written: later it would be too late to say so."""
        from migrator.driver.trace import Trace  # after `enter`: it loads gRPC

        self.trace: Trace = Trace()
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until the command ends
        except OSError as error:
            raise Usage(
                f"--trace: {path} cannot be written: {error.strerror}", remedy="name a file that can be made"
            ) from error

    def write(self, about: dict[str, Any]) -> None:
        """Writes what was recorded, once. `about` is the result of the move."""
        from migrator.driver import trace_events

        if self._file.closed:
            return
        self.trace.about = about
        try:
            with self._file as file:
                json.dump(trace_events.document(self.trace), file)
        except OSError as error:
            told = f"the trace was not written: {error.strerror}"
            print(f"{output.styled('migrator:', 'yellow', sys.stderr)} {told}", file=sys.stderr)
