"""A job that starts programs all the time is moved at the first request, whatever those do at that moment."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

from integration.harness import Cluster

PROGRAMS = Path(__file__).parent / "programs"
MOVES = 5
F_OFD_SETLK = 37


def test_job_that_starts_programs_all_the_time_moves_every_time(nodes: Cluster) -> None:
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    program = [sys.executable, str(PROGRAMS / "short_children.py"), "--end-file", str(end)]
    job = nodes.start("node-1", program)
    job.await_lines(5)
    places = ["spare-1", "node-2", "node-1"]
    for number in range(MOVES):
        nodes.move(job, places[number % len(places)])
        job.await_progress()
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.lines() == [*(f"step {step}" for step in range(steps)), "DONE"]


def test_lock_of_another_process_on_dev_null_does_not_stop_a_move(nodes: Cluster) -> None:
    """The nodes of the lab share /dev/null's inode with this process, as processes of one node do."""
    job = nodes.workload("node-1", "train.py", "--steps", "100000")
    job.await_lines(3)
    null = os.open("/dev/null", os.O_RDWR)
    try:
        fcntl.fcntl(null, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        nodes.move(job, "spare-1")
        job.await_progress()
    finally:
        os.close(null)
