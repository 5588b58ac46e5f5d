"""Stops the processes that hold sockets while those are changed, and continues exactly those that ran.

Invariant: which processes we stop is on storage before the first is stopped. So whoever comes after a crash continues
them, and a process that somebody else had stopped stays stopped.
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
from snapshotd.net.capture import put_in_place
from snapshotd.proc import tree
from snapshotd.proc.tree import Process

_LOOK_AGAIN_S = 50e-6


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """This thread runs whenever it can, where the node allows it: on a busy one a single turn lost is 20 ms of pause."""
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
    """One stop of a set of processes; `note` is the file that says which."""

    def __init__(self, note: Path, processes: Iterable[Process]) -> None:
        self.seconds = 0.0
        self._note = note
        self._processes = sorted(set(processes))
        self._kept: set[Process] = set()

    @contextlib.contextmanager
    def stopped(self, timeout_s: float) -> Iterator[None]:
        """No thread of the processes runs inside; those that are gone do not matter. Raises Timeout, all continued."""
        ours = self._ours()
        began = time.monotonic()
        try:
            with _first_in_line():
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
        """These are not continued at the end: a socket of theirs is not whole."""
        self._kept.update(processes)

    def let_go(self, processes: Iterable[Process]) -> None:
        """Takes `keep_stopped` back."""
        self._kept.difference_update(processes)

    def _ours(self) -> list[Process]:
        """Those that run now, and those that an earlier life of us stopped and did not live to continue."""
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
                        remedy="a process in state D waits for a device or a network file system; try again later",
                        where=Where.UNKNOWN,
                    )
                time.sleep(_LOOK_AGAIN_S)

    def _read(self) -> list[Process]:
        try:
            return [Process(pid, ticks) for pid, ticks in json.loads(self._note.read_text())]
        except FileNotFoundError:
            return []

    def _write(self, processes: Iterable[Process]) -> None:
        put_in_place(self._note, json.dumps([[process.pid, process.start_ticks] for process in processes]).encode())
