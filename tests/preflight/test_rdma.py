"""RDMA devices of a rank: NCCL's own are closed during a move and pass; others are refused by the name of their owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import ncclctl
from snapshotd.preflight import NcclReports, recheck
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Kind, kind_of
from snapshotd.preflight.rdma_checks import rdma
from tests.descriptors import open_links
from tests.preflight.conftest import Starter
from tests.preflight.gpu_ranks import gpu_rank
from tests.preflight.ranks import Child
from tests.preflight.test_nccl import library

DEVICE = "/dev/infiniband/uverbs0"
OPEN = f"opened = os.open({DEVICE!r}, os.O_RDONLY)"


def report(*devices: ncclctl.RdmaDevice, communicators: int = 1) -> ncclctl.Report:
    comm = ncclctl.Communicator("00000000000000aa", 2, 0, "live")
    return ncclctl.Report("", False, 0, (comm,) * communicators, 1, rdma=devices)


def descriptor(pid: int) -> int:
    (found,) = [number for number, link in open_links(pid).items() if link == DEVICE]
    return found


def checked(child: Child, *reports: ncclctl.Report, frozen: bool = False) -> Check:
    nccl = None if frozen else NcclReports(tuple((child.pids[0], one) for one in reports))
    return rdma(Inspection(child.pids, child.pids[0], (), nccl=nccl, frozen=frozen))


def test_rank_without_rdma_passes(rank: Starter) -> None:
    child = rank()
    assert (checked(child).verdict, checked(child).reason) == (Check.PASS, "no RDMA device open")


def test_device_of_nccl_passes_and_is_said_to_be_closed(rank: Starter) -> None:
    child = gpu_rank(rank, OPEN)
    number = descriptor(child.pids[0])
    check = checked(child, report(ncclctl.RdmaDevice("mlx5_0", "/opt/libnccl.so.2", True, (number, 99))))
    assert check.verdict == Check.PASS
    assert check.reason == "1 devices of NCCL, which are closed when its communicators are taken down"


def test_device_of_nccl_without_a_communicator_is_closed_as_well(rank: Starter) -> None:
    """NCCL keeps its devices after the last communicator. Such a process gets a gate like one that has communicators."""
    child = gpu_rank(rank, OPEN)
    device = ncclctl.RdmaDevice("mlx5_0", "/opt/libnccl.so.2", True, (descriptor(child.pids[0]), 99))
    left = report(device, communicators=0)
    assert checked(child, left).verdict == Check.PASS
    assert left.concerned
    assert not report(communicators=0).concerned
    facts, _ = child.inspect(keeper_pid=child.pid, keeper_is_guest=True, nccl=NcclReports(((child.pids[0], left),)))
    assert list(facts.nccl_rdma) == ["mlx5_0"]


@pytest.mark.parametrize(
    ("owner", "remedy"),
    [
        ("libuct_ib.so.0", "UCX_TLS=tcp"),
        ("libnccl-net-ofi.so", "NCCL_NET_PLUGIN=none"),
        ("nvshmem_transport_ibrc.so.3", "NVSHMEM_REMOTE_TRANSPORT=none"),
        ("libvendor.so", "NCCL_IB_DISABLE=1"),
        ("libnccl.so.2", "through the dynamic linker"),
    ],
)
def test_device_of_another_library_is_refused_by_its_name(rank: Starter, owner: str, remedy: str) -> None:
    """The second device is NCCL's: that one would be closed."""
    child = gpu_rank(rank, OPEN)
    foreign = ncclctl.RdmaDevice("mlx5_0", f"/opt/{owner}", False, (descriptor(child.pids[0]), 99))
    check = checked(child, report(foreign, ncclctl.RdmaDevice("mlx5_1", "/opt/libnccl.so.2", True, (97, 98))))
    assert check.verdict == Check.REFUSE
    assert f"{DEVICE}, opened by {owner}" in check.reason
    assert remedy in check.remedy


def test_device_without_a_known_owner_is_refused_with_a_loaded_library_that_uses_rdma(
    rank: Starter, tmp_path: Path, compiler: str
) -> None:
    """As of a library that looks libibverbs up with dlsym."""
    child = gpu_rank(rank, OPEN)
    assert "opened by a library that is not known" in checked(child, report()).reason
    loaded = library(compiler, tmp_path / "libnvshmem_host.so.3")
    child = gpu_rank(rank, f"ctypes.CDLL('{loaded}')\n{OPEN}")
    check = checked(child)
    assert "opened by probably libnvshmem_host.so.3" in check.reason
    assert "NVSHMEM_REMOTE_TRANSPORT=none" in check.remedy


def test_after_the_freeze_no_device_may_be_left(rank: Starter) -> None:
    child = gpu_rank(rank, OPEN)
    check = checked(child, frozen=True)
    assert check.verdict == Check.REFUSE
    assert "still has RDMA devices open" in check.reason
    facts, _ = child.inspect(keeper_pid=child.pid, keeper_is_guest=True)
    again = recheck(child.pids, facts, carry_paths=(), keeper_pid=child.pid, keeper_is_guest=True)
    assert "rdma" in [each.name for each in again.checks if each.verdict == Check.REFUSE]


def test_event_descriptors_of_rdma_are_recognised_by_their_name() -> None:
    """Otherwise they would be refused as kernel objects, by whomever they were opened."""
    assert kind_of("anon_inode:[infinibandevent]", None) is Kind.RDMA
    assert kind_of("anon_inode:[eventfd]", None) is Kind.ANON
