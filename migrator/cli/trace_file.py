"""The file of `migrator move --trace`. It is written when the move has ended, however it did, and has its name only then: a
file of that name stays as it is until the new one is complete."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from migrator.cli import output
from snapshotd.api.errors import Usage

if TYPE_CHECKING:
    from migrator.driver.trace import Trace


class TraceFile:
    """Invariant: a trace that cannot be written changes neither the move nor the exit code.

    It names commands, paths and nodes of the job, so that only its owner may read it. A link is not followed: another user
    could have made it."""

    def __init__(self, path: str) -> None:
        """Raises Usage if the file cannot be written: later it would be too late to say so."""
        from migrator.driver.trace import Trace  # after `enter`: it loads gRPC

        self.trace: Trace = Trace()
        self.path = Path(path)
        try:
            self._file = _beside(self.path)
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
            os.replace(self._file.name, self.path)
        except OSError as error:
            told = f"the trace was not written: {error.strerror}"
            print(f"{output.styled('migrator:', 'yellow', sys.stderr)} {told}", file=sys.stderr)
            self._remove()

    def close(self) -> None:
        """Leaves nothing behind if nothing was written."""
        if not self._file.closed:
            self._file.close()
            self._remove()

    def _remove(self) -> None:
        Path(self._file.name).unlink(missing_ok=True)


def _beside(path: Path) -> IO[str]:
    """A new file in the folder of `path`, which only this user may read. Raises OSError, also if something that is not a file
    has that name."""
    try:
        regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        regular = True
    if not regular:
        raise OSError(0, "it exists, and is not a regular file")
    return tempfile.NamedTemporaryFile(
        "w", prefix=f".{path.name[:100]}.", dir=path.parent, encoding="utf-8", delete=False
    )
