"""The copies of a data-parallel job's snapshot: what the nodes that keep them have already is not sent, and they are as good
as those that were sent whole."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from integration.configuring import configured
from integration.harness import MIGRATOR, Cluster, until
from integration.job_commands import WHOLE_JOBS, ask
from integration.torch_jobs import HOMES, TorchLab, at_rest
from snapshotd.transport.pace import BURST_S

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

SPARE = "spare-1"
#: Weights that are equal in all ranks at every moment. Those that are trained differ within a step.
FROZEN_MIB = 64
PAGE_BYTES = 4096


@pytest.fixture
def torch_lab(wide_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(wide_lab) as lab:
        yield lab


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
    first = ask(nodes, "snapshot", job.name)
    _assert_found(first)
    job.await_progress(2)
    second = ask(nodes, "snapshot", job.name)
    _assert_found(second)
    assert second["found_bytes"] > first["found_bytes"], "each rank's copy of before has what it did not change"
    (copy,) = [rank["copy"] for rank in second["ranks"] if rank["node"] == SPARE]
    assert copy != SPARE
    job.await_progress(2)

    nodes.lab.crash(SPARE)
    try:
        answer = ask(nodes, "rollback", job.name, "--lost", SPARE)
        assert SPARE not in {rank["node"] for rank in answer["ranks"]}
        job.await_progress(2)
    finally:
        nodes.lab.boot(SPARE)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", *workload, world=len(HOMES))
    until("nothing to be left", lambda: not nodes.leftovers())


LIMIT, LIMIT_BYTES_PER_S = "2MB/s", 2e6
CHUNK_BYTES = 2 << 20


@pytest.fixture
def limited(torch_lab: TorchLab) -> Iterator[TorchLab]:
    with configured(torch_lab.cluster, HOMES[:2], {"copy_limit": LIMIT}):
        yield torch_lab


@pytest.mark.timeout(900)
def test_copies_keep_to_their_limit_until_something_waits_for_them(limited: TorchLab) -> None:
    nodes, homes = limited.cluster, HOMES[:2]
    job = limited.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=homes, name="limited")
    job.await_steps(3)
    taking = subprocess.Popen(
        [*MIGRATOR, "job", "snapshot", job.name, "--json"], env=nodes.environment(), stdout=subprocess.PIPE, text=True
    )
    waiting: set[int] = set()

    def hurried() -> bool:
        """Moves to where the ranks are: refused for that reason when no copy is on its way any more."""
        for rank, node in enumerate(homes):
            asked = ("--job", job.name, "--rank", str(rank), "--to", node)
            if "a copy of its snapshot is being sent" in nodes.migrator("move", *asked).stderr:
                waiting.add(rank)
        return len(waiting) == len(homes)

    until("moves to wait for the copies", hurried)
    out, _ = taking.communicate()
    assert taking.returncode == 0, f"{out}\n{nodes.logs()}"
    lifted = json.loads(out)
    assert _copy_s(lifted) < lifted["copied_bytes"] / len(homes) / LIMIT_BYTES_PER_S, "faster than the limit allows"

    job.await_progress(2)
    kept = ask(nodes, "snapshot", job.name)
    assert [part["name"] for part in kept["parts"] if part["name"] == "limit"] == ["limit"], kept
    least_bytes = kept["copied_bytes"] / len(homes) - CHUNK_BYTES  # before the last chunk of the slower node
    assert _copy_s(kept) > least_bytes / LIMIT_BYTES_PER_S - BURST_S, kept
    job.await_progress(2)
    job.end.touch()
    job.assert_whole()


def _copy_s(snapshot: dict[str, Any]) -> float:
    return float(next(phase["seconds"] for phase in snapshot["phases"] if phase["name"] == "copy"))
