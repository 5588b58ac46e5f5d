"""Tests of the library's threads that copy: they are created once, persist, and do not affect the job."""

from __future__ import annotations

import errno
import os
import struct

from tests.shim.jobs import STUCK_S
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import OFFLOAD, STRIPES, refused

EXEMPT_AT, EXEMPT_COUNT = 656, 64


def test_workers_are_created_once(start_job: Start) -> None:
    job = start_job("grow 1")
    assert job.workers() == []
    job.ready()
    workers = job.workers()
    assert len(workers) == STRIPES
    for _ in range(3):
        job.offload()
        assert job.workers() == workers
        job.come_back()
    assert job.workers() == workers


def test_program_ends_although_workers_exist(start_job: Start) -> None:
    """A program ends when its own last thread ends, after its main thread has exited."""
    job = start_job()
    job.ready()
    assert len(job.workers()) == STRIPES
    assert job.do("leave") == "done"
    assert job.popen.wait(STUCK_S) == 0


def test_workers_are_not_created_if_the_exempt_table_is_full(start_job: Start) -> None:
    job = start_job("grow 1")
    place = job.mailbox().address + EXEMPT_AT
    memory = os.open(f"/proc/{job.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(memory, 4 * EXEMPT_COUNT, place)
        taken = [number or 1 for number in struct.unpack(f"<{EXEMPT_COUNT}i", before)]
        os.pwrite(memory, struct.pack(f"<{EXEMPT_COUNT}i", *taken), place)
        with refused(errno.EAGAIN, "too many threads"):
            job.ready()
        assert (job.workers(), job.leftovers()) == ([], [])
        os.pwrite(memory, before, place)
    finally:
        os.close(memory)
    job.ready()
    job.park_threads()
    job.ask(OFFLOAD)
    job.come_back()
