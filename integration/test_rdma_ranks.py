"""NCCL ranks with open RDMA devices move, and their results are exact. Daemons, CRIU and shim are real; the libraries of NCCL
and of InfiniBand (libibverbs) are fakes, and a device is a file.

As far as the real NCCL goes with the fake libibverbs, on a GPU, see integration/gpu/rdma_probe.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from integration.harness import PATIENCE_S, Cluster, until
from integration.nccl_nodes import FOREIGN, NcclJob, rdma_devices, rdma_of, unsettled
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = ("node-1", "node-2", "spare-1")
REFUSED, UNDONE = 10, 11


@pytest.fixture
def rdma(nodes: Cluster) -> Iterator[Cluster]:
    with rdma_devices(nodes):
        yield nodes


def devices_of(nodes: Cluster, job: NcclJob) -> list[list[str]]:
    """The RDMA devices that each rank has open or mapped, wherever it runs."""
    return [rdma_of(pid) for pid in nodes.processes_of(str(job.meeting))]


def test_rank_of_four_with_open_rdma_devices_moves_there_and_back(rdma: Cluster) -> None:
    job = NcclJob(rdma, [SOURCE, SOURCE, PEER, PEER], shape="pairs", pace_s=0.05, rdma=True)
    job.await_lines(5)
    each = [f"/dev/infiniband/uverbs{number}" for number in (0, 0, 1, 1)]  # open and mapped
    assert devices_of(rdma, job) == [each] * 4
    for to in (TARGET, SOURCE):
        checked = rdma.migrator("check", "--rank", "1", "--job", job.ranks[1].name, "--to", to)
        assert "devices of NCCL, which are closed when its communicators are taken down" in checked.stdout, checked
        rdma.move(job.ranks[1], to, rank=1)
        job.await_progress()
        assert devices_of(rdma, job) == [each] * 4
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL failures")
def test_device_that_cannot_be_closed_is_named_and_the_rank_stays(rdma: Cluster) -> None:
    job = NcclJob(rdma, [SOURCE, PEER], rdma=True)
    job.await_lines(5)
    # A thread of NCCL that does not end.
    job.fault(0, "ibevent:*:1:hang")
    result = rdma.move(job.ranks[0], TARGET, expect=UNDONE, timeout_s=2 * PATIENCE_S)
    assert "which waits for events of the RDMA device fakeib" in result["reason"], result
    assert result["where"] == "running on source", result
    job.fault(0, "")
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(rdma))
    # A device that another library opens when the job is stopped already: undone.
    with rdma.moving(job.ranks[0], TARGET, SOURCE, Point.BEFORE_DETACH) as asked:
        job.open_beside_nccl(0)
    assert asked.code == UNDONE, f"{asked}\n{rdma.logs()}"
    assert f"belongs to {FOREIGN}; nothing was closed" in asked.answer["reason"], asked
    job.await_progress()
    until("all moves to be settled", lambda: not unsettled(rdma))
    # The same device before the next move: refused, and nothing is paused.
    result = rdma.move(job.ranks[0], TARGET, expect=REFUSED)
    assert f"opened by {FOREIGN}" in json.dumps(result), result
    job.ends_well()


@pytest.mark.sampled(1, group="NCCL jobs")
def test_rank_whose_nccl_keeps_devices_without_a_communicator_moves(rdma: Cluster) -> None:
    """NCCL never closes its devices. A node without any is refused in advance."""
    job = NcclJob(rdma, [SOURCE], shape="brief", rdma=True)
    job.await_lines(5)
    ((each, *_),) = [devices_of(rdma, job)]
    assert each
    for to in (TARGET, SOURCE):
        rdma.move(job.ranks[0], to)
        job.await_progress()
        assert devices_of(rdma, job) == [[]]
    with rdma.lab.spawn(TARGET, ["sh", "-c", "rm /dev/infiniband/uverbs*"]) as running:
        assert running.wait(PATIENCE_S) == 0
    job.ends_well()
    beside = NcclJob(rdma, [SOURCE, PEER], rdma=True)
    beside.await_lines(5)
    result = rdma.move(beside.ranks[0], TARGET, expect=REFUSED)
    assert "target-rdma" in json.dumps(result), result
    beside.ends_well()
