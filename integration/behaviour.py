"""Helpers for the tests of what a launcher sees: readers for its pipes, and a job whose complete output is known."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from typing import Any

from integration.harness import Job, until

HOME, AWAY, THIRD = "node-1", "spare-1", "node-2"


class Reader:
    """Reads a pipe to its end in the background."""

    def __init__(self, stream: Any) -> None:
        self.data = bytearray()
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            self.data += data

    def whole(self) -> bytes:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"the pipe has not ended; so far {len(self.data)} bytes"
        self._stream.close()
        return bytes(self.data)

    def await_bytes(self, count: int) -> None:
        until(f"{count} bytes, have {len(self.data)}", lambda: len(self.data) >= count)

    def await_more(self, count: int = 1 << 20) -> None:
        self.await_bytes(len(self.data) + count)


def chain(steps: int) -> str:
    """What workloads/chain.py prints."""
    lines, state = [], b""
    for step in range(steps):
        state = hashlib.sha256(state).digest()
        lines.append(f"step {step} {state.hex()[:16]}\n")
    return "".join([*lines, "DONE\n"])


def end_chain(job: Job) -> None:
    """Ends the job with SIGTERM; its output is that of an uninterrupted run."""
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    assert job.text() == chain(len(job.lines()) - 1)
