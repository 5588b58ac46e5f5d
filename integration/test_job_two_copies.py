"""Snapshots of which two other nodes keep copies: a job goes on after a rank's node and its first buddy were lost together,
and a copy that does not arrive leaves the snapshot before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from integration.harness import MIGRATOR, Cluster, until
from integration.job_commands import WHOLE_JOBS, ask, snapshots
from integration.torch_jobs import HOMES, TorchLab, at_rest
from snapshotd.api.errors import Refused
from snapshotd.runtime.faults import Point

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO, THREE, FOUR = HOMES
SPARE = "spare-1"
#: Both are lost, so that those are left which have the launchers.
LOST = (THREE, FOUR)
COPIES = ("--copies", "2")


@pytest.fixture
def torch_lab(wide_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(wide_lab) as lab:
        yield lab


def _copies(snapshot: dict[str, Any]) -> dict[int, list[str]]:
    return {rank["rank"]: rank["copies"] for rank in snapshot["ranks"]}


@pytest.mark.timeout(900)
def test_job_goes_on_after_a_rank_and_its_first_buddy_were_lost_together(torch_lab: TorchLab) -> None:
    """Both ranks, the coordinator, and two of the three places of each image are lost. Nobody declares a node dead: three of
    five nodes are left, one of which keeps no image and has a vote."""
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "2", "--until", "{end}", nodes=(ONE, TWO), name="twice")
    job.await_steps(3)
    for rank, node in enumerate(LOST):
        nodes.move(job.agents[0], node, rank=rank)
    said = nodes.folder / f"{job.name}.protect"
    with said.open("w") as out:
        protect = [*MIGRATOR, "protect", job.name, "--every", "600", "--tries", "20", *COPIES]
        guard = subprocess.Popen(protect, env=nodes.environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        until("the first snapshot", lambda: ", paused " in said.read_text())
        (known,) = snapshots(nodes, job.name)
        assert _copies(known) == {0: [FOUR, ONE], 1: [THREE, TWO]}
        assert known["coordinator"] == THREE
        job.await_progress(2)
        for node in LOST:
            nodes.lab.crash(node)
        until("the rollback", lambda: ", down " in said.read_text(), 300)
        assert job.where() == {0: SPARE, 1: ONE}, said.read_text()
        job.await_progress(3)
    finally:
        guard.kill()
        guard.wait()
        for node in LOST:
            nodes.lab.boot(node)
    until(
        "the job to be coordinated elsewhere",
        lambda: [one["coordinator"] for one in snapshots(nodes, job.name)] == [ONE],
    )
    assert len(nodes.processes_of(str(job.end))) == 2
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the snapshot to be removed with its job", lambda: snapshots(nodes, job.name) == [])
    until("nothing to be left", lambda: not nodes.leftovers())


@pytest.mark.timeout(900)
def test_snapshot_counts_with_all_copies_only_and_unreachable_buddies_are_replaced(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "2", "--until", "{end}", nodes=(ONE, TWO), name="counts")
    job.await_steps(3)
    refused = ask(nodes, "snapshot", job.name, "--copies", "5", expect=Refused.exit_code)
    nodes_named = ", ".join(sorted(nodes.lab.nodes))
    assert f"need 6 nodes, and 5 answer: {nodes_named}. --copies 4 is possible now" in refused["reason"]
    first = ask(nodes, "snapshot", job.name, *COPIES)
    assert _copies(first) == {0: [TWO, THREE], 1: [ONE, FOUR]}
    job.await_progress(2)

    nodes.fault(THREE, Point.RECEIVING, "kill")
    done = nodes.migrator("job", "snapshot", job.name, *COPIES, "--json")
    assert nodes.lab.daemon_pid(THREE) is None, f"{done.stdout}\n{nodes.logs()}"
    try:
        assert json.loads(done.stdout)["outcome"] == "undone", f"{done.stdout}\n{nodes.logs()}"
        assert [one["record"] for one in snapshots(nodes, job.name)] == [first["record"]]
        job.await_progress(2)
        second = ask(nodes, "snapshot", job.name, *COPIES)
        assert _copies(second) == {0: [TWO, FOUR], 1: [ONE, SPARE]}, "the node that does not answer is left out"
    finally:
        nodes.lab.start_daemon(THREE)
    until(
        "the second snapshot to replace the first",
        lambda: [one["record"] for one in snapshots(nodes, job.name)] == [second["record"]],
    )
    ask(nodes, "rollback", job.name)
    job.await_progress(2)
    third = ask(nodes, "snapshot", job.name)
    assert _copies(third) == {0: [TWO, THREE], 1: [ONE, FOUR]}, "as many as were asked for last"
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())
