"""Tests of what the gate reports, blocks and refuses."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest

from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import CLOSE, DETACH, OPEN, TARGETS, Refused


@pytest.mark.parametrize("nranks", [2, 5])
def test_groups_are_launched_at_their_end(job: Job, nranks: int) -> None:
    job.start("jobs.groups", nranks)
    job.all_right()


def test_report_names_what_cannot_be_moved(job: Job) -> None:
    job.start("jobs.refusable", 2)
    job.reach(1)
    gates = job.gates()
    gates.all(CLOSE)
    reports = gates.reports()
    for report in reports:
        refused = sorted(reason for comm in report["comms"] for reason in comm["refused"])
        assert refused == ["it has a device communicator", "it has a symmetric-memory window"]
        assert [comm["state"] for comm in report["ended"]] == ["aborted"]
        assert sum(not comm["refused"] for comm in report["comms"]) == 1
    assert [report["ids_unused"] for report in reports] == [1, 0]
    for comm in reports[0]["comms"]:
        if comm["refused"]:
            with pytest.raises(Refused, match="the report gives the reason") as refusal:
                gates.gates[0].ask(DETACH, comm["id"])
            assert refusal.value.status == errno.EPERM
    gates.all(OPEN)
    job.stop()


def test_closed_gate_lets_operations_pass_up_to_their_targets(job: Job) -> None:
    job.start("jobs.plain", 1)
    job.reach(1)
    (gate,) = job.gates().gates
    gate.ask(CLOSE)
    while not (report := gate.report())["held"]:
        time.sleep(0.002)
    (comm,) = report["comms"]
    before = comm["collectives"]
    for more in (1, 2, 3):
        gate.ask(TARGETS, f"{comm['id']} c -1 {before + more}")
        while not (report := gate.report())["held"] or report["comms"][0]["collectives"] < before + more:
            time.sleep(0.002)
        # A group with a collective may also have sent to itself; no more than one unit passes per target.
        assert report["comms"][0]["collectives"] == before + more
    gate.ask(OPEN)
    job.stop()


def test_permission_lets_a_thread_pass_until_a_channel_has_its_count(job: Job) -> None:
    job.start("jobs.plain", 1)
    job.reach(1)
    (gate,) = job.gates().gates
    gate.ask(CLOSE)
    while not (report := gate.report())["held"]:
        time.sleep(0.002)
    (comm,) = report["comms"]
    before, passed, thread = comm["collectives"], report["passed"], report["held"][0]["thread"]

    def told(text: str, wanted: int, groups: int = passed) -> dict[str, Any]:
        gate.ask(TARGETS, text)
        while (
            not (found := gate.report())["held"]
            or found["comms"][0]["collectives"] < wanted
            or found["passed"] < groups
        ):
            time.sleep(0.002)
        time.sleep(0.05)  # a further launch would be seen
        again = gate.report()
        assert again["comms"][0]["collectives"] == found["comms"][0]["collectives"]
        return again

    until = f"{comm['id']} c -1 {before + 5}"
    assert told(f"permit {thread + 1} {passed + 1000} {until}", before)["comms"][0]["collectives"] == before
    assert told(f"permit {thread} {passed} {until}", before)["comms"][0]["collectives"] == before
    assert told(f"permit {thread} {passed + 1} {until}", before, passed + 1)["passed"] == passed + 1
    assert told(f"permit 0 {passed + 1000} {until}", before + 5)["comms"][0]["collectives"] == before + 5
    gate.ask(OPEN)
    job.stop()


def test_counts_are_exact_whenever_the_gate_is_closed(job: Job) -> None:
    """The counts of both ranks are equal at the cut."""
    job.start("jobs.plain", 2)
    job.reach(1)
    gates = job.gates()
    for _ in range(10):
        gates.to_the_cut()
        first, second = gates.reports()
        assert first["comms"][0]["collectives"] == second["comms"][0]["collectives"]
        assert first["comms"][0]["sent"]["1"] == second["comms"][0]["received"]["0"]
        assert second["comms"][0]["sent"]["0"] == first["comms"][0]["received"]["1"]
        gates.all(OPEN)
        time.sleep(0.01)
    job.stop()


def test_invalid_targets_are_refused(job: Job) -> None:
    job.start("jobs.plain", 1)
    job.reach(1)
    (gate,) = job.gates().gates
    for text in ("x", "0123 q -1 5", "0123 c", "permit 0 5", "permit 0 0123 c -1 5", "permit x 5 0123 c -1 5"):
        with pytest.raises(Refused, match="not a target") as refused:
            gate.ask(TARGETS, text)
        assert refused.value.status == errno.EINVAL
    job.stop()
