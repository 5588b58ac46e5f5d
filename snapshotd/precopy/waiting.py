"""How much of its time a job runs, and waits for a processor: the kernel counts it for each thread (schedstat)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from snapshotd.proc.files import GONE

#: Reading one takes some microseconds. Of a process with more threads the first ones count.
MAX_THREADS = 128
_LEAST_BUSY = 0.02


class Waiting:
    """Blocking, for moments."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = self._read()
        self._at_s = time.monotonic()
        self.busy = 0.0  # how many threads ran at a time, between the last two calls

    def part(self) -> float:
        """The part of the time that the threads wanted to run, since the last call, in which they waited. Threads that ended
        meanwhile do not count. 0 where the kernel does not count it."""
        now, at_s = self._read(), time.monotonic()
        ran = waited = 0
        for thread, (ran_ns, waited_ns) in now.items():
            before = self._before.get(thread)
            if before is not None:
                ran, waited = ran + ran_ns - before[0], waited + waited_ns - before[1]
        self.busy = ran / 1e9 / max(at_s - self._at_s, 0.001)
        least_ns = (at_s - self._at_s) * _LEAST_BUSY * 1e9
        self._before, self._at_s = now, at_s
        return waited / max(ran + waited, least_ns, 1)

    def _read(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for pid in self._pids:
            with contextlib.suppress(*GONE, OSError):
                for thread in os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]:
                    with (
                        contextlib.suppress(*GONE, OSError, ValueError),
                        open(f"/proc/{pid}/task/{thread}/schedstat", "rb", buffering=0) as file,
                    ):
                        ran, waited, *_ = file.read(100).split()
                        found[thread] = (int(ran), int(waited))
        return found
