"""How much of each GPU a rank uses, and how much memory its node and its cgroups have left."""

from __future__ import annotations

import _ctypes
import os
import shutil
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.preflight import uses_cuda
from snapshotd.proc.memory import cgroup_rooms, memory_room
from tests.preflight.conftest import Starter
from tests.preflight.gpu_ranks import MIB, card, gpu_rank, inspect, seen
from tests.preflight.ranks import Child

pytestmark = pytest.mark.usefixtures("shim")


def uses(child: Child, *cards: pb.Gpu, cuda_pids: tuple[int, ...] | None = None) -> dict[int, int]:
    """index -> MiB"""
    facts = inspect(child, seen(child, *cards, cuda_pids=cuda_pids))[0]
    index = {gpu.uuid: gpu.index for gpu in facts.gpu.node_gpus}
    return {index[use.uuid]: use.memory_bytes // MIB for use in facts.gpu.uses}


def test_uses_follow_the_processes_that_the_driver_reports(rank: Starter) -> None:
    child = gpu_rank(rank)
    mine, other = child.pids[0], pb.GpuProcess(pid=os.getpid(), memory_bytes=7 * MIB)
    assert uses(child, card(0, pb.GpuProcess(pid=mine, memory_bytes=5 * MIB), other), card(1, other)) == {0: 5}
    # On two GPUs. The share of the second is unknown: all of that GPU's used memory counts.
    unknown = card(1, pb.GpuProcess(pid=mine), other, used=90 * MIB)
    assert uses(child, card(0, pb.GpuProcess(pid=mine, memory_bytes=5 * MIB)), unknown) == {0: 5, 1: 90}
    # No context yet: the driver reports only other processes.
    assert uses(child, card(0, other)) == {}


@pytest.mark.parametrize("result", [(), (2**22 + 5,)], ids=["no processes", "pids of another namespace"])
def test_without_reported_processes_open_devices_count(rank: Starter, result: tuple[int, ...]) -> None:
    processes = [pb.GpuProcess(pid=pid, memory_bytes=MIB) for pid in result]
    assert uses(gpu_rank(rank), card(0, used=40 * MIB), card(1, *processes, used=50 * MIB)) == {0: 40}


def test_processes_with_libcuda_are_found(rank: Starter, tmp_path: Path) -> None:
    shutil.copy(_ctypes.__file__, tmp_path / "libcuda.so.1")
    shutil.copy(_ctypes.__file__, tmp_path / "libcudart.so.13")
    with_it = rank(f"ctypes.CDLL('{tmp_path}/libcuda.so.1')")
    without = rank(f"ctypes.CDLL('{tmp_path}/libcudart.so.13')")
    assert uses_cuda([without.pid, with_it.pid, 2**22 + 1]) == [with_it.pid]


def test_memory_limits_of_both_cgroup_versions_are_read(tmp_path: Path) -> None:
    unified, memory = tmp_path / "unified", tmp_path / "memory"
    for folder, limit, use, limits in (
        (unified, "memory.max", "memory.current", {"": None, "job": "1000", "job/rank": "max"}),
        (memory, "memory.limit_in_bytes", "memory.usage_in_bytes", {"": "5000", "slurm": "2000"}),
    ):
        for name, result in limits.items():
            (folder / name).mkdir(parents=True)
            if result:
                (folder / name / limit).write_text(f"{result}\n")
                (folder / name / use).write_text("900\n")
                (folder / name / "memory.stat").write_text("inactive_file 10\nactive_file 20\ntotal_inactive_file 40\n")
    mounts = f"1 0 0:1 / {unified} rw - cgroup2 none rw\n2 0 0:2 / {memory} rw - cgroup none rw,memory\n"
    mounts += "3 0 0:3 / /x rw - tmpfs none rw\n"
    membership = "5:cpu:/slurm\n4:memory:/slurm\n0::/job/rank\n"
    assert dict(cgroup_rooms(membership, mounts)) == {
        f"cgroup {unified}/job": 130,
        f"cgroup {memory}/slurm": 1140,
        f"cgroup {memory}": 4140,
    }
    assert list(cgroup_rooms("0::/../..\n", mounts)) == []
    assert list(cgroup_rooms(membership, "")) == []


def test_the_tightest_limit_comes_first() -> None:
    rooms = memory_room(os.getpid())
    assert "this node" in dict(rooms)
    assert [room for _, room in rooms] == sorted(room for _, room in rooms)
