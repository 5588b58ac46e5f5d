"""`migrator lab run`: waits for the ranks of a job, prefixes their output and returns their exit status.

Invariant: everything that a rank wrote is printed before `follow` returns, in whole lines, each prefixed with its rank. A
newline is added to a last line that has none.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

READ_BYTES = 1 << 16


class _Output:
    """One pipe of one rank, printed line by line."""

    def __init__(self, rank: int, pipe: IO[bytes], to: IO[bytes]) -> None:
        self.prefix = f"[{rank}] ".encode()
        self.pipe, self.to = pipe, to
        self.partial = b""

    def pump(self) -> bool:
        """Prints what can be read. Returns False at the end of the output."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        *lines, self.partial = (self.partial + data).split(b"\n")
        if not data and self.partial:
            lines, self.partial = [self.partial], b""
        if lines:
            self.to.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.to.flush()
        return bool(data)


def follow(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until all ranks have ended; forwards SIGINT and SIGTERM. Returns the status of the first that failed, else 0."""
    failed = 0
    with selectors.DefaultSelector() as selector, _forwarded(ranks):
        for number, rank in enumerate(ranks):
            assert rank.stdout is not None
            assert rank.stderr is not None
            for pipe, to in ((rank.stdout, sys.stdout.buffer), (rank.stderr, sys.stderr.buffer)):
                selector.register(pipe, selectors.EVENT_READ, _Output(number, pipe, to))
            selector.register(os.pidfd_open(rank.pid), selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                if isinstance(key.data, _Output):
                    if not key.data.pump():
                        selector.unregister(key.fileobj)
                        key.data.pipe.close()
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    failed = failed or exit_status(key.data.wait())
    return failed


def exit_status(returncode: int) -> int:
    """The status as a shell reports it: 128 + the signal's number for a process that a signal ended."""
    return returncode if returncode >= 0 else 128 - returncode


@contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forwards signals. The ranks are in separate sessions, so they receive a terminal's Ctrl-C only from here, and once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return

    def forward(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
