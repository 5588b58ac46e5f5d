"""The copies of a data-parallel job's snapshot: what the nodes that keep them have already is not sent, and they are as good
as those that were sent whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from integration.harness import Cluster, until
from integration.torch_jobs import HOMES, TorchLab, at_rest

pytestmark = [pytest.mark.root, pytest.mark.slow]

SPARE = "spare-1"
#: Weights that are equal in all ranks at every moment. Those that are trained differ within a step.
FROZEN_MIB = 64
PAGE_BYTES = 4096


@pytest.fixture
def torch_lab(wide_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(wide_lab) as lab:
        yield lab


def _job(nodes: Cluster, *arguments: str) -> dict[str, Any]:
    done = nodes.migrator("job", *arguments, "--json")
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{nodes.logs()}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _assert_found(snapshot: dict[str, Any]) -> None:
    """The nodes of the copies had the frozen weights of all ranks, and the rest was sent, with digests."""
    frozen_bytes = (FROZEN_MIB << 20) - PAGE_BYTES  # they begin within a page
    assert snapshot["found_bytes"] >= len(HOMES) * frozen_bytes, snapshot
    stored_bytes = snapshot["bytes"] - snapshot["copied_bytes"]
    assert snapshot["copied_bytes"] + snapshot["found_bytes"] <= 1.02 * stored_bytes, snapshot


@pytest.mark.timeout(900)
def test_replicas_are_not_sent_and_a_job_is_rolled_back_from_such_copies(torch_lab: TorchLab) -> None:
    nodes, workload = torch_lab.cluster, ("--frozen-mib", str(FROZEN_MIB))
    job = torch_lab.plain("ddp.py", *workload, "--pace-s", "0.3", "--until", "{end}", nodes=HOMES, name="replicas")
    job.await_steps(3)
    nodes.move(job.agents[0], SPARE, rank=1)  # its launcher outlives its node
    first = _job(nodes, "snapshot", job.name)
    _assert_found(first)
    job.await_progress(2)
    second = _job(nodes, "snapshot", job.name)
    _assert_found(second)
    assert second["found_bytes"] > first["found_bytes"], "each rank's copy of before has what it did not change"
    (copy,) = [rank["copy"] for rank in second["ranks"] if rank["node"] == SPARE]
    assert copy != SPARE
    job.await_progress(2)

    nodes.lab.crash(SPARE)
    try:
        answer = _job(nodes, "rollback", job.name, "--lost", SPARE)
        assert SPARE not in {rank["node"] for rank in answer["ranks"]}
        job.await_progress(2)
    finally:
        nodes.lab.boot(SPARE)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", *workload, world=len(HOMES))
    until("nothing to be left", lambda: not nodes.leftovers())
