"""Tests that what NCCL leaves in a process is found and named. The stand-in leaves what the test asks for."""

from __future__ import annotations

import asyncio

import pytest

from snapshotd.api.errors import GpuFailed, Undone
from snapshotd.moves.nccl import leftovers
from snapshotd.proc import tree
from tests.shim.jobs import until
from tests.shim.nccl.conftest import Job
from tests.shim.nccl.gates import ATTACH, NEW_ID, OPEN, Refused


def detached(job: Job, **environment: str) -> list[tree.Process]:
    """One rank whose communicators are down."""
    job.start("jobs.plain", 1, **environment)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    gates.detach(gates.live(gates.reports()))
    return [tree.Process.of(process.pid) for process in job.processes]


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        # Another process may have the port of RAS's clients, so its socket is looked for where a node is alone:
        # integration/test_nccl_ranks.py.
        ("ras", ("1 thread of its RAS", "NCCL_RAS_ENABLE=0")),
        ("memory", ("memory of its transport through shared memory", "NCCL_SHM_DISABLE=1")),
        ("socket", ("a Unix socket of its sharing of device memory", "NCCL_CUMEM_ENABLE=0")),
    ],
)
def test_what_is_left_is_named_with_the_setting_that_avoids_it(job: Job, leaves: str, said: tuple[str, ...]) -> None:
    processes = detached(job, FAKE_NCCL_LEAVES=leaves)
    with pytest.raises(Undone) as undone:
        asyncio.run(leftovers.must_be_none(processes))
    text = f"{undone.value.message} {undone.value.advice}"
    assert [part for part in (*said, f"process {processes[0].pid} has", "--nccl-safe") if part not in text] == [], text
    assert str(undone.value.where) == "running on source"


def test_thread_of_a_feature_that_is_not_known_is_named_as_such(job: Job) -> None:
    processes = detached(job, FAKE_NCCL_LEAVES="thread", NCCL_RAS_ENABLE="0")
    with pytest.raises(Undone) as undone:
        asyncio.run(leftovers.must_be_none(processes))
    assert "1 thread of its feature that is not known here" in undone.value.message
    assert undone.value.advice.startswith("start the job with `migrator run --nccl-safe`")


def test_nothing_is_left_where_the_features_are_off(job: Job) -> None:
    off = {"NCCL_RAS_ENABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
    asyncio.run(leftovers.must_be_none(detached(job, FAKE_NCCL_LEAVES="ras,memory,socket", **off)))


@pytest.mark.parametrize("look_s", [leftovers.LOOK_S, 0.0])  # 0: a node so slow that the time is over after one look
def test_threads_of_the_job_that_run_all_the_time_are_not_taken_for_nccl(
    job: Job, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    monkeypatch.setattr(leftovers, "LOOK_S", look_s)
    job.start("jobs.busy", 1)
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    gates.detach(gates.live(gates.reports()))
    process = tree.Process.of(job.processes[0].pid)
    asyncio.run(leftovers.must_be_none([process]))


def test_threads_of_ids_whose_attach_failed_are_explained(job: Job) -> None:
    job.start("jobs.plain", 2, NCCL_RAS_ENABLE="0")
    job.reach(1)
    gates = job.gates()
    gates.to_the_cut()
    reports = gates.reports()
    comms = gates.live(reports)
    gates.detach(comms)
    maker = gates.gates[0]
    maker.ask(NEW_ID)  # never attached with
    number = maker.send(ATTACH, gates.attach_lines(reports, comms), timeout_s=3600.0)
    maker.cancel(number)
    with pytest.raises(Refused):
        maker.finish(number)
    maker.until_idle()
    until(lambda: maker.report()["nccl_threads"] > 0, "an id's thread is seen")
    asyncio.run(leftovers.must_be_none([tree.Process.of(maker.pid)]))
    assert maker.report()["ids_unused"] == 2
    gates.attach(reports, comms)
    assert maker.report()["ids_unused"] == 2, "the id of an attach that succeeded has no thread"
    gates.all(OPEN)
    job.reach(max(job.steps()) + 2)
    job.stop()


def test_failed_checkpoint_names_features_whose_memory_only_the_driver_knows(job: Job) -> None:
    failure = GpuFailed("the driver says no", remedy="look it up")
    job.start("jobs.idle", 2, NCCL_NVLS_ENABLE="0", NCCL_CUMEM_HOST_ENABLE="1")
    explained = leftovers.explained(failure, [tree.Process.of(job.processes[0].pid)])
    assert explained.message == failure.message
    assert explained.advice.startswith("look it up")
    assert "host memory of the CUDA driver (NCCL_CUMEM_HOST_ENABLE)" in explained.advice
    assert "NVLS" not in explained.advice
    assert leftovers.explained(failure, []) is failure
