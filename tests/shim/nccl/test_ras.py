"""RAS, which NCCL keeps after its last communicator, is ended for a move. NCCL is a fake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapshotd.api.errors import Undone
from snapshotd.moves.nccl import leftovers
from snapshotd.net.sockets import tree_flows
from snapshotd.proc import tree
from tests.descriptors import open_links
from tests.shim.jobs import until
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import CLOSE_DEVICES, FRESH, NEW_ID, OPEN, Gate, Gates

#: NCCL's other functions for the exit of the process say that they have run.
ENVIRONMENT = {"FAKE_NCCL_LEAVES": "ras", "FAKE_NCCL_ENDS": "1", "NCCL_RAS_ENABLE": "1"}
ENDED = "environment ended"


def start(job: Job, scenario: str, nranks: int, **environment: str) -> Gates:
    job.start(scenario, nranks, **(ENVIRONMENT | environment))
    job.reach(1)
    return job.gates()


def down(gates: Gates) -> tuple[list[dict[str, Any]], set[str]]:
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    return reports, comms


def listens(gate: Gate) -> bool:
    return any(flow.listens for flow in tree_flows([gate.pid]))


def pipes(gate: Gate) -> int:
    """How many descriptors of pipes it has; a rank of these jobs has none of its own but perhaps its input and output."""
    return sum(link.startswith("pipe:") for number, link in open_links(gate.pid).items() if number > 2)


def check(gate: Gate) -> None:
    asyncio.run(leftovers.must_be_none([tree.Process.of(gate.pid)]))


def test_ras_is_ended_and_a_fresh_copy_starts_it_again(job: Job) -> None:
    gates = start(job, "jobs.grid", 2)
    moved, other = gates.gates
    before = pipes(moved)
    for move in range(3):
        reports, comms = down(gates)
        until(lambda: moved.report()["nccl_threads"] == 1, "the thread of RAS is seen")
        assert listens(moved)
        ended = job.output().count(ENDED)
        moved.ask(CLOSE_DEVICES)
        check(moved)
        assert job.output().count(ENDED) == ended  # a copy that is unloaded later runs it
        assert (listens(moved), listens(other), pipes(moved)) == (False, True, before - 2)
        moved.ask(CLOSE_DEVICES)  # idempotent
        if move != 1:  # else as in an undo, where attaching notices that a fresh copy is needed
            moved.ask(FRESH)
        gates.attach(reports, comms)
        assert [report["instance"] for report in gates.reports()] == [move + 1, 0]
        reached = max(job.steps())
        gates.all(OPEN)
        job.reach(reached + 2)
        until(lambda: listens(moved) and pipes(moved) == before, "the fresh copy has RAS")
    job.stop()
    assert job.output().count(ENDED) == 5  # of four copies in one process and of one in the other


def test_nothing_is_ended_where_ras_is_off(job: Job) -> None:
    gates = start(job, "jobs.grid", 2, NCCL_RAS_ENABLE="0")
    reports, comms = down(gates)
    gates.all(CLOSE_DEVICES)
    gates.attach(reports, comms)
    assert [report["instance"] for report in gates.reports()] == [0, 0]
    gates.all(OPEN)
    assert ENDED not in job.output()
    job.stop()
    assert job.output().count(ENDED) == 2


def test_thread_of_an_unused_id_does_not_let_other_functions_run(job: Job) -> None:
    gates = start(job, "jobs.plain", 1, NCCL_RAS_ENABLE="0")
    down(gates)
    (gate,) = gates.gates
    gate.ask(NEW_ID)
    until(lambda: gate.report()["nccl_threads"] == gate.report()["ids_unused"] > 0, "the threads of ids are seen")
    gate.ask(CLOSE_DEVICES)
    assert ENDED not in job.output()


def test_ras_of_a_version_that_cannot_end_it_is_named(job: Job) -> None:
    gates = start(job, "jobs.plain", 1, FAKE_NCCL_LEAVES="old-ras")
    down(gates)
    (gate,) = gates.gates
    gate.ask(CLOSE_DEVICES)
    with pytest.raises(Undone, match="1 thread of its RAS"):
        check(gate)
