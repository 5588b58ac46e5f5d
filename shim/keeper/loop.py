"""The keepers' event loop: collects the descriptors to wait for, polls, calls back. Standard library only.

Wishes are collected anew in every round and not registered. A keeper has few descriptors, and this excludes stale
registrations (a busy loop on a closed pipe, a missed wake-up). It uses poll and not epoll, because stdin and stdout may
be regular files.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Wish(NamedTuple):
    """Calls `on_readable` or `on_writable` when `fd` is. A hang-up or error also calls one; its I/O then fails."""

    fd: int
    on_readable: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None


class Timer:
    """A call in the future that can be cancelled."""

    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Runs until `leave` is called."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._sources: list[Callable[[], Iterable[Wish]]] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()
        self._leaving = False
        self._wakeup_fd = -1
        self._on_signal: Callable[[int], None] | None = None

    def add(self, wishes: Callable[[], Iterable[Wish]]) -> None:
        """Calls `wishes` before every poll."""
        self._sources.append(wishes)

    def before(self, work: Callable[[], None]) -> None:
        """Calls `work` before the wishes are collected, so that what it queues is sent in the same round."""
        self._work.append(work)

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay_s, call)
        heapq.heappush(self._timers, (timer.due_s, next(self._serial), timer))
        return timer

    def catch(self, numbers: Iterable[int], on_signal: Callable[[int], None]) -> None:
        """From now on, calls `on_signal` from the loop for each of these signals that arrives."""
        self._on_signal = on_signal
        self._wakeup_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, _noted)
        self.add(lambda: [Wish(self._wakeup_fd, self._signalled)])

    def leave(self) -> None:
        self._leaving = True

    def run(self) -> None:
        while not self._leaving:
            self._round()

    def _round(self) -> None:
        for work in self._work:
            work()
        if self._leaving:
            return
        wishes = [wish for source in self._sources for wish in source()]
        events: dict[int, int] = {}
        for wish in wishes:
            wanted = (select.POLLIN if wish.on_readable else 0) | (select.POLLOUT if wish.on_writable else 0)
            events[wish.fd] = events.get(wish.fd, 0) | wanted
        poll = select.poll()
        for fd, wanted in events.items():
            poll.register(fd, wanted)
        ready = dict(poll.poll(self._timeout_ms()))
        trouble = select.POLLHUP | select.POLLERR | select.POLLNVAL
        for wish in wishes:
            seen = ready.get(wish.fd, 0)
            if wish.on_readable and seen & (select.POLLIN | trouble):
                wish.on_readable()
            if wish.on_writable and seen & (select.POLLOUT | (0 if wish.on_readable else trouble)):
                wish.on_writable()
        while self._timers and (self._timers[0][2].cancelled or self._timers[0][0] <= time.monotonic()):
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.call()

    def _timeout_ms(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, (self._timers[0][0] - time.monotonic()) * 1000 + 0.5)

    def _signalled(self) -> None:
        try:
            numbers = os.read(self._wakeup_fd, 4096)
        except BlockingIOError:
            return
        for number in numbers:
            if self._on_signal:
                self._on_signal(number)


def _noted(_number: int, _frame: object) -> None:
    """Does nothing. Python writes the number to the wake-up pipe only for signals that have a handler."""
