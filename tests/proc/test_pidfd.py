"""Pidfds of processes, and of numbers that are none."""

from __future__ import annotations

import os
import select
import subprocess
import threading

import pytest

from snapshotd.proc.pidfd import open_pidfd
from snapshotd.proc.tree import Process


def test_a_process_is_opened_and_one_that_was_reaped_is_not() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    pidfd = open_pidfd(child.pid)
    child.kill()
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    assert ended.poll(60_000)
    os.close(pidfd)
    child.wait()
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_the_number_of_a_thread_is_no_process() -> None:
    """As if the process had ended, and a thread had got its number."""
    numbers: list[int] = []
    known, over = threading.Event(), threading.Event()

    def run() -> None:
        numbers.append(threading.get_native_id())
        known.set()
        over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert known.wait(60)
        with pytest.raises(ProcessLookupError):
            open_pidfd(numbers[0])
        process = Process(numbers[0], Process.of(os.getpid()).start_ticks)
        with pytest.raises(ProcessLookupError), process.pidfd():
            pass
        assert not process.signal(0)
    finally:
        over.set()
        thread.join()
