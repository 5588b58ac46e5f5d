"""Stops the processes that hold sockets while those are changed, and continues exactly those that were running.

Invariant: the list of processes is saved before the first one is stopped. So the next call after a crash continues
them, and a process that was stopped before stays stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshotd.api.errors import Timeout, Where
from snapshotd.net.socket_state import put_in_place
from snapshotd.proc import tree
from snapshotd.proc.tree import Process

_POLL_S = 50e-6


@contextlib.contextmanager
def _real_time() -> Iterator[None]:
    """Real-time priority for this thread, where allowed: on a busy node one lost time slice adds 20 ms to the pause."""
    before, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameter)


class Pause:
    """One stop of a set of processes, whose list is in the file `note`."""

    def __init__(self, note: Path, processes: Iterable[Process]) -> None:
        self.seconds = 0.0
        self._note = note
        self._processes = sorted(set(processes))
        self._kept: set[Process] = set()

    @contextlib.contextmanager
    def stopped(self, timeout_s: float) -> Iterator[None]:
        """No thread of the processes runs inside; processes that are gone are ignored. Raises Timeout, with all continued."""
        ours = self._ours()
        began = time.monotonic()
        try:
            with _real_time():
                self._stop(timeout_s)
                yield
        finally:
            left = [process for process in ours if process in self._kept]
            for process in ours:
                if process not in self._kept:
                    process.signal(signal.SIGCONT)
            self.seconds = time.monotonic() - began
            if left:
                self._write(left)
            else:
                self._note.unlink(missing_ok=True)

    def keep_stopped(self, processes: Iterable[Process]) -> None:
        """Does not continue these at the end: one of their sockets is not a working connection."""
        self._kept.update(processes)

    def let_go(self, processes: Iterable[Process]) -> None:
        """Reverts `keep_stopped`."""
        self._kept.difference_update(processes)

    def _ours(self) -> list[Process]:
        """The processes that run now, and those that a call before a crash stopped and did not continue."""
        before = self._read()
        ours = sorted({*before, *(process for process in self._processes if not tree.stopped(process.pid))})
        if ours != before:
            self._write(ours)
        return ours

    def _stop(self, timeout_s: float) -> None:
        for process in self._processes:
            process.signal(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            while not tree.stopped(process.pid):
                if time.monotonic() > deadline:
                    raise Timeout(
                        f"process {process.pid} does not stop (state {tree.state(process.pid)})",
                        remedy="a process in state D waits for a device or a network file system; retry later",
                        where=Where.UNKNOWN,
                    )
                time.sleep(_POLL_S)

    def _read(self) -> list[Process]:
        try:
            return [Process(pid, ticks) for pid, ticks in json.loads(self._note.read_text())]
        except FileNotFoundError:
            return []

    def _write(self, processes: Iterable[Process]) -> None:
        put_in_place(self._note, json.dumps([[process.pid, process.start_ticks] for process in processes]).encode())
