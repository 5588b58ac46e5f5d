"""The counts of NCCL operations are read from a process's memory, without its taking part."""

from __future__ import annotations

import os
import signal
import struct
import time

import pytest

from snapshotd.inprocess import counts
from snapshotd.inprocess.counts import LAYOUT, Counts, Layout, Membership
from snapshotd.proc.tree import Process, stopped
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import CLOSE, OPEN

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reading the memory of other processes needs root")


def found(job: Job) -> list[Counts]:
    made = [counts.find(Process.of(process.pid)) for process in job.processes]
    assert all(made)
    return [one for one in made if one is not None]


def test_counts_are_those_of_the_report(job: Job) -> None:
    job.start("jobs.grid", 2)
    job.reach(3)
    gates = job.gates()
    gates.all(CLOSE)  # from now on nothing is counted
    for one, report in zip(found(job), gates.reports(), strict=True):
        expected = {
            (int(comm["id"], 16), comm["nranks"], comm["rank"]): comm for comm in report["comms"] if comm["nranks"] > 1
        }
        read = {(each.comm, each.nranks, each.member): each.collectives for each in one.read()}
        assert read == {key: comm["collectives"] for key, comm in expected.items()}
        by_peer = [sum(comm[kind].values()) for comm in expected.values() for kind in ("sent", "received")]
        assert one.operations() == sum(read.values()) + sum(by_peer)
        assert sum(by_peer) > 0
    gates.all(OPEN)
    job.stop()


def test_a_stopped_process_can_be_read_and_its_counts_stand_still(job: Job) -> None:
    job.start("jobs.plain", 2)
    job.reach(2)
    process = job.processes[0]
    process.send_signal(signal.SIGSTOP)
    while not stopped(process.pid):
        time.sleep(0.002)
    one, other = found(job)
    before = one.operations()
    assert before > 0
    assert one.operations() == before
    process.send_signal(signal.SIGCONT)
    while one.operations() == before:
        time.sleep(0.002)
    assert {each.comm for each in one.read()} == {each.comm for each in other.read()}
    job.stop()


def test_process_without_communicators_has_no_counts(job: Job) -> None:
    assert counts.find(Process.of(os.getpid())) is None


SOUND = {
    "version": 1,
    "record_bytes": 64,
    "at_id": 0,
    "at_state": 8,
    "at_nranks": 12,
    "at_rank": 16,
    "at_collectives": 24,
    "at_peers": 32,
    "live": 2,
    "at_with": 8,
    "records": 4096,
    "used": 3,
}


def packed(**changes: int) -> bytes:
    return LAYOUT.pack(*{**SOUND, **changes}.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"record_bytes": 0},
        {"record_bytes": 1 << 31},
        {"at_id": 60},
        {"at_rank": 62},
        {"at_peers": 0xFFFFFFFF},
    ],
)
def test_forged_layouts_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"version|layout"):
        Layout.unpack(packed(**changes))


def test_records_that_make_no_sense_are_left_out() -> None:
    def record(state: int, nranks: int, rank: int) -> bytes:
        return struct.pack("<QiiiiQQ24x", 7, state, nranks, rank, 0, 5, 0)

    layout = Layout.unpack(packed())
    raw = record(2, 4, 1) + record(1, 4, 1) + record(2, 1, 0) + record(2, 4, 4) + record(2, 1 << 30, 0) + b"x" * 63
    assert layout.memberships(raw) == (Membership(7, 4, 1, 5, 0),)
    assert len(layout.memberships(record(2, 4, 1) * 100)) == counts.COMMUNICATORS_MAX
