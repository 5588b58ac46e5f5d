"""Tests what a report costs: the driver of a move asks every process for one in every round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snapshotd.inprocess import ncclctl
from snapshotd.proc import status, tree
from tests.shim.jobs import until
from tests.shim.nccl.conftest import Job

THREADS = 600


def read_bytes(pid: int) -> int:
    """What a process has read so far, from its own memory, too."""
    found = re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())
    assert found is not None
    return int(found[1])


def test_report_of_a_process_with_many_threads_reads_no_more_than_its_stacks(job: Job) -> None:
    """It read a MiB for each thread once, in every report."""
    job.start("jobs.crowded", 1, CROWD=str(THREADS))
    job.reach(1)
    gates, pid = job.gates(), job.processes[0].pid
    before = read_bytes(pid)
    assert gates.gates[0].report()["nccl_threads"] == -1  # not counted while a communicator is up
    assert read_bytes(pid) - before < 1 << 20
    gates.to_the_cut()
    comms = gates.live(gates.reports())
    gates.detach(comms)
    until(lambda: gates.gates[0].report()["nccl_threads"] == 0, "NCCL's threads are gone")
    before = read_bytes(pid)
    report = gates.gates[0].report()
    assert (report["nccl_threads"], read_bytes(pid) - before < THREADS * (32 << 10)) == (0, True)


def test_daemon_looks_at_few_threads_for_a_report(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listed all threads of the process twice for each request, to find the one that answers."""
    job.start("jobs.crowded", 1, CROWD=str(THREADS))
    job.reach(1)
    process = tree.Process.of(job.processes[0].pid)
    until(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) > THREADS)
    ncclctl.read(process)
    looked: list[int] = []
    read = status.read

    def counted(pid: int, thread: int | None = None) -> status.Status:
        looked.append(thread or pid)
        return read(pid, thread)

    monkeypatch.setattr(status, "read", counted)
    assert ncclctl.read(process).comms
    assert len(looked) < 30
