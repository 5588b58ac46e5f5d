"""Ranks that use a GPU."""

from __future__ import annotations

import _ctypes
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import devmem
from snapshotd.preflight import DriverReport, recheck, refusals, shared_memory
from snapshotd.preflight.source import GPU_CHECKS, SOURCE_CHECKS
from snapshotd.proc import tree
from tests.preflight.conftest import Starter
from tests.preflight.gpu_ranks import MIB, FakeShim, card, gpu_rank, inspect, seen
from tests.preflight.ranks import CARRY_PATHS

pytestmark = pytest.mark.usefixtures("shim")


def test_rank_that_uses_cuda_passes(rank: Starter) -> None:
    """What the driver has open in the process passes every check, because the checkpoint closes it before CRIU runs."""
    child = gpu_rank(rank)
    plain = inspect(gpu_rank(rank, "pass"), None)[0].memory_bytes
    facts, checks = inspect(child, seen(child))
    assert [check for check in checks.values() if check.verdict != Check.PASS] == []
    assert list(checks) == [*SOURCE_CHECKS, *GPU_CHECKS, "facts"]
    assert f"(pid {child.pids[0]})" in checks["gpu-descriptors"].reason
    assert not [fact.path for fact in facts.files if fact.path.startswith("/dev/")]
    assert facts.gpu.driver_version == "580.159.04"
    assert [(gpu.index, len(gpu.processes)) for gpu in facts.gpu.node_gpus] == [(0, 0)]
    assert [(use.uuid, use.memory_bytes) for use in facts.gpu.uses] == [("GPU-0a1b2c3d-0000", 30 * MIB)]
    assert (facts.gpu.device_bytes, facts.gpu.processes) == (30 * MIB, 1)
    assert 25 * MIB < facts.memory_bytes - plain < 45 * MIB  # device memory once, and the mapped device not at all


def test_rank_without_gpu_gets_one_gpu_check(rank: Starter) -> None:
    facts, checks = rank().inspect()
    assert not facts.HasField("gpu")
    assert [(check.name, check.reason) for check in checks.values() if "gpu" in check.name] == [
        ("gpu-descriptors", "no GPU in use")
    ]


STRANGERS = {
    "watcher": ("a = os.open('/dev/nvidiactl', os.O_RDWR)", "/dev/nvidiactl", "migrator run"),
    "mapped": ("at(0x300000000, '/dev/nvidia0', 4096)", "maps /dev/nvidia0", "migrator run"),
    "amd": ("os.open('/dev/kfd', os.O_RDWR)", "/dev/kfd", "only NVIDIA GPUs can be moved"),
    "display": ("os.open('/dev/dri/card0', os.O_RDWR)", "/dev/dri/card0", "only NVIDIA GPUs can be moved"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_gpu_that_the_checkpoint_does_not_close_is_refused(rank: Starter, case: str) -> None:
    feature, where, remedy = STRANGERS[case]
    child = gpu_rank(rank, feature)
    for report in (None, seen(child, cuda_pids=())):
        checks = inspect(child, report)[1]
        assert [check.name for check in refusals(checks.values())] == ["gpu-descriptors"]
        assert f"(pid {child.pids[0]})" in checks["gpu-descriptors"].reason
        assert where in checks["gpu-descriptors"].reason
        assert remedy in checks["gpu-descriptors"].remedy


@pytest.mark.parametrize("name", ["nvidia-modeset", "dri/card0"])
def test_devices_that_the_checkpoint_does_not_cover_are_refused(rank: Starter, name: str) -> None:
    child = gpu_rank(rank, f"gpu()\nos.open('/dev/{name}', os.O_RDWR)")
    checks = inspect(child, seen(child))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-descriptors"]
    assert f"/dev/{name}" in checks["gpu-descriptors"].reason
    assert "/dev/nvidia0" not in checks["gpu-descriptors"].reason


def test_forked_child_with_its_parents_gpu_is_refused(rank: Starter) -> None:
    child = gpu_rank(rank, "gpu()\nbeside(lambda: None)")
    (worker,) = map(int, Path(f"/proc/{child.pids[0]}/task/{child.pids[0]}/children").read_text().split())
    child.pids.append(worker)
    checks = inspect(child, seen(child, cuda_pids=(child.pids[0],)))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-descriptors"]
    assert f"(pid {worker}) fd " in checks["gpu-descriptors"].reason
    assert f"(pid {child.pids[0]})" not in checks["gpu-descriptors"].reason


def test_gpu_that_is_still_open_after_the_freeze_is_refused(rank: Starter) -> None:
    child = gpu_rank(rank)
    facts = inspect(child, seen(child))[0]
    checks = recheck(child.pids, facts, carry_paths=CARRY_PATHS, keeper_pid=child.pid, keeper_is_guest=True).checks
    (left,) = refusals(checks)
    assert left.name == "gpu-descriptors"
    assert "/dev/nvidia0" in left.reason


ALTERED: dict[str, tuple[str, Callable[[DriverReport], DriverReport], str, str]] = {
    "old driver": ("gpu()", lambda report: replace(report, driver_version="565.57.01"), "gpu-driver", "565.57.01"),
    "no driver": (
        "gpu()",
        lambda report: replace(report, driver_version="", problem="NVML: no"),
        "gpu-driver",
        "NVML: no",
    ),
    "no gpus": ("gpu()", lambda report: replace(report, gpus=()), "gpu-driver", "reports none"),
    "managed memory": (
        "gpu()\nat(0x7e0000000000, '/dev/nvidia-uvm', 8 << 20)",
        lambda report: report,
        "gpu-managed-memory",
        r": 8 MiB",
    ),
    "rdma": ("gpu()\nos.open('/dev/infiniband/uverbs0', os.O_RDONLY)", lambda report: report, "rdma", "uverbs0"),
    "mig": (
        "gpu()",
        lambda report: replace(report, gpus=(card(0, *report.gpus[0].processes, mig=True),)),
        "gpu-mig",
        "0 (NVIDIA H200",
    ),
    "mps": (
        "gpu()",
        lambda report: replace(
            report, gpus=(card(0, pb.GpuProcess(pid=report.cuda_pids[0], memory_bytes=1, mps=True)),)
        ),
        "gpu-mps",
        "pid",
    ),
    "large": (
        "gpu()",
        lambda report: replace(report, gpus=(card(0, pb.GpuProcess(pid=report.cuda_pids[0], memory_bytes=1 << 50)),)),
        "gpu-host-memory",
        "leaves",
    ),
}


@pytest.mark.parametrize("case", ALTERED)
def test_refused_by_name(rank: Starter, case: str) -> None:
    feature, alter, name, expected = ALTERED[case]
    child = gpu_rank(rank, feature)
    checks = inspect(child, alter(seen(child)))[1]
    assert [check.name for check in refusals(checks.values())] == [name]
    assert expected in checks[name].reason
    assert checks[name].remedy


def test_memory_that_stays_on_its_gpu_needs_host_memory_for_a_window_only(rank: Starter, shim: FakeShim) -> None:
    child, size = gpu_rank(rank), 1 << 50
    shim.bytes, shim.blocks = size, 1
    report = seen(child, card(0, pb.GpuProcess(pid=child.pids[0], memory_bytes=size + 30 * MIB)))
    facts, checks = inspect(child, report, holds=True)
    assert checks["gpu-host-memory"].verdict == Check.PASS
    assert (facts.gpu.offloaded_bytes, facts.gpu.held_stripes) == (size, devmem.STRIPES)
    assert (facts.gpu.slot_bytes, facts.gpu.device_bytes) == (devmem.SLOT_BYTES, size + 30 * MIB)
    assert inspect(child, report)[1]["gpu-host-memory"].verdict == Check.REFUSE
    shim.bytes = size - (1 << 45)  # a rest that the driver's checkpoint carries
    assert inspect(child, report, holds=True)[1]["gpu-host-memory"].verdict == Check.REFUSE
    two = seen(child, *report.gpus, card(1, pb.GpuProcess(pid=child.pids[0], memory_bytes=MIB)))
    facts, checks = inspect(child, two, holds=True)
    assert (facts.gpu.held_stripes, checks["gpu-host-memory"].verdict) == (0, Check.REFUSE)


def test_lost_gpu_is_warned_about(rank: Starter) -> None:
    child = gpu_rank(rank)
    check = inspect(child, replace(seen(child), problem="GPU 1 is lost"))[1]["gpu-driver"]
    assert check.verdict == Check.WARN
    assert "GPU 1 is lost" in check.reason


def test_threads_that_cannot_be_parked_are_refused(rank: Starter, shim: FakeShim) -> None:
    child = gpu_rank(rank)
    shim.obstacles = [f"process {child.pids[0]}: thread 7 (loader) blocks the signal"]
    checks = inspect(child, seen(child))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-parking"]
    assert shim.obstacles[0] in checks["gpu-parking"].reason
    assert "migrator run" in checks["gpu-parking"].remedy
    assert inspect(child, seen(child, cuda_pids=()))[1]["gpu-parking"].verdict == Check.PASS


@pytest.mark.parametrize(("exports", "imports"), [(1, 0), (0, 2)])
def test_device_memory_shared_with_others_is_refused(rank: Starter, shim: FakeShim, exports: int, imports: int) -> None:
    child = gpu_rank(rank)
    shim.exports, shim.imports = exports, imports
    checks = inspect(child, seen(child))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-ipc"]
    assert f"{exports} handles exported, {imports} opened" in checks["gpu-ipc"].reason
    assert set(shim.asked) == {tree.Process.of(child.pids[0])}
    shim.missing = True
    assert inspect(child, seen(child))[1]["gpu-ipc"].verdict == Check.PASS


@pytest.fixture
def sharing(shim: FakeShim, monkeypatch: pytest.MonkeyPatch) -> FakeShim:
    """Processes that share what can move."""
    monkeypatch.setattr(shared_memory, "LOOK_AGAIN_S", 0.0)
    shim.exports = shim.moving_exports = 1
    shim.imports = shim.moving_imports = 2
    shim.server, shim.opened_from = 5, (5,)
    return shim


def test_device_memory_that_processes_of_the_rank_share_can_move(rank: Starter, sharing: FakeShim) -> None:
    child = gpu_rank(rank)
    facts, checks = inspect(child, seen(child))
    assert (checks["gpu-ipc"].verdict, checks["gpu-ipc"].reason) == (
        Check.PASS,
        "1 handles exported, 2 opened, all between processes of the rank",
    )
    assert facts.protocol.oldest == protocol.SHARED_DEVICE_MEMORY, "an older target refuses it (daemon-version)"
    sharing.exports = sharing.moving_exports = sharing.imports = sharing.moving_imports = 0
    assert inspect(child, seen(child))[0].protocol == protocol.own()


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"opened_from": (5, 6)}, "not in the rank, or have ended", "host memory"),
        ({"shared_outside": True}, "processes that are not in the rank have opened its", "host memory"),
        ({"moving_exports": 0}, "that does not move with it", "--device-memory shared"),
        ({"moving_imports": 1}, "that does not move with it", "--device-memory shared"),
        ({"moving_imports": 1, "opened_from": (5,) * 16}, "of more than 16 others", "host memory"),
    ],
)
def test_shared_memory_that_cannot_move_is_refused(
    rank: Starter, sharing: FakeShim, change: dict[str, object], reason: str, remedy: str
) -> None:
    child = gpu_rank(rank)
    for name, value in change.items():
        setattr(sharing, name, value)
    check = inspect(child, seen(child))[1]["gpu-ipc"]
    assert check.verdict == Check.REFUSE
    assert reason in check.reason
    assert remedy in check.remedy


def test_counts_that_are_read_while_they_change_refuse_nothing(sharing: FakeShim) -> None:
    """A handle counts as open before its memory is mapped."""
    looks: list[int] = []

    def read() -> list[tuple[str, FakeShim]]:
        looks.append(len(looks))
        return [("process 7", replace(sharing, moving_imports=1 if len(looks) < shared_memory.LOOKS else 2))]

    assert shared_memory.lasting(read)[0] is None
    assert len(looks) == shared_memory.LOOKS
    looks.clear()
    stuck, _ = shared_memory.lasting(lambda: [("process 7", replace(sharing, moving_imports=1))])
    assert stuck is not None


def test_shared_memory_leaves_in_stripes_however_small_it_is(rank: Starter, shim: FakeShim) -> None:
    child = gpu_rank(rank)
    shim.bytes, shim.blocks = MIB, 1
    assert inspect(child, seen(child), holds=True)[0].gpu.held_stripes == 0
    shim.exports = shim.moving_exports = 1
    assert inspect(child, seen(child), holds=True)[0].gpu.held_stripes == devmem.STRIPES


def test_process_without_the_shim_is_refused(rank: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real shimctl: the shim is not preloaded here."""
    monkeypatch.undo()
    child = gpu_rank(rank)
    checks = inspect(child, seen(child))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-parking"]
    assert "runs without libsnapshim.so" in checks["gpu-parking"].reason


def test_shim_of_another_version_is_reported_once(
    rank: Starter, shim: FakeShim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(process: tree.Process) -> FakeShim:
        raise GpuFailed("another version")

    monkeypatch.setattr(shim, "find", find)
    shim.obstacles = ["another version"]
    child = gpu_rank(rank)
    assert [check.name for check in refusals(inspect(child, seen(child))[1].values())] == ["gpu-parking"]


def test_managed_memory_that_was_freed_is_warned_about(rank: Starter, shim: FakeShim) -> None:
    child = gpu_rank(rank)
    shim.managed = 3
    check = inspect(child, seen(child))[1]["gpu-managed-memory"]
    assert check.verdict == Check.WARN
    assert f"(pid {child.pids[0]}): 3 times" in check.reason


def test_gpu_of_other_processes_does_not_count(rank: Starter) -> None:
    """MIG, MPS and memory on GPUs that the rank does not use."""
    child = gpu_rank(rank)
    other = card(1, pb.GpuProcess(pid=os.getpid(), memory_bytes=1 << 50, mps=True), mig=True)
    facts, checks = inspect(child, seen(child, *seen(child).gpus, other))
    assert refusals(checks.values()) == []
    assert [use.memory_bytes for use in facts.gpu.uses] == [30 * MIB]
    assert len(facts.gpu.node_gpus) == 2


@pytest.mark.parametrize(
    ("value", "visible"), [("0", 1), ("GPU-12,GPU-34", 2), ("3,1,-1,2", 2), ("", 0), ("0,1,,2", 2)]
)
def test_number_of_visible_gpus_is_read(
    rank: Starter, monkeypatch: pytest.MonkeyPatch, value: str, visible: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    child = gpu_rank(rank)
    assert inspect(child, seen(child))[0].gpu.visible == visible


@pytest.mark.parametrize(("told", "visible"), [("2,3", 2), ("", 0), (None, 1)])
def test_visible_gpus_are_those_that_the_program_set_before_cuda_started(
    rank: Starter, shim: FakeShim, monkeypatch: pytest.MonkeyPatch, told: str | None, visible: int
) -> None:
    """/proc/PID/environ has only the environment with which the process was started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    child = gpu_rank(rank)
    shim.visible = told
    assert inspect(child, seen(child))[0].gpu.visible == visible


def test_lost_gpu_is_among_the_facts(rank: Starter) -> None:
    """The rank has initialised CUDA when the node still had it."""
    child = gpu_rank(rank)
    lost = pb.Gpu(uuid="GPU-lost", index=1, name="NVIDIA H200", lost=True)
    facts, checks = inspect(child, replace(seen(child), lost=(lost,), problem="GPU 1: GPU is lost"))
    assert [(gpu.uuid, gpu.lost) for gpu in facts.gpu.node_gpus][1:] == [("GPU-lost", True)]
    assert checks["gpu-driver"].verdict == Check.WARN
    assert "known since the node booted: 1 (NVIDIA H200, GPU-lost)" in checks["gpu-driver"].reason


def test_gpu_that_was_missed_before_the_process_started_does_not_count(rank: Starter) -> None:
    """The process never saw it, so its restore needs no counterpart, and the rank may go to a node with fewer GPUs."""
    child = gpu_rank(rank)
    started_s = tree.Process.of(child.pids[0]).start_ticks / os.sysconf("SC_CLK_TCK")
    before = pb.Gpu(uuid="GPU-before", index=1, name="NVIDIA H200", lost=True, missed_since_s=started_s - 60)
    after = pb.Gpu(uuid="GPU-after", index=2, name="NVIDIA H200", lost=True, missed_since_s=started_s + 60)
    facts, checks = inspect(child, replace(seen(child), lost=(before, after)))
    assert [gpu.uuid for gpu in facts.gpu.node_gpus][1:] == ["GPU-after"]
    assert "GPU-before" not in checks["gpu-driver"].reason
    assert inspect(child, replace(seen(child), lost=(before,)))[1]["gpu-driver"].verdict == Check.PASS


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("CUDA_INJECTION64_PATH", "/opt/nsight/lib.so", "gpu-profiler"),
        ("NSYS_PROFILING_SESSION_ID", "7", "gpu-profiler"),
        ("CUDA_VISIBLE_DEVICES", "MIG-0a1b", "gpu-mig"),
        ("CUDA_VISIBLE_DEVICES", "0", ""),
        ("NSYS_NVTX_PROFILER_REGISTER_ONLY", "0", ""),
    ],
)
def test_environment_that_prevents_a_checkpoint_is_refused(
    rank: Starter, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str
) -> None:
    monkeypatch.setenv(variable, value)
    child = gpu_rank(rank)
    checks = inspect(child, seen(child))[1]
    assert [check.name for check in refusals(checks.values())] == ([name] if name else [])
    assert not name or f"(pid {child.pids[0]})" in checks[name].reason


@pytest.mark.parametrize(
    ("library", "refused"),
    [("libToolsInjection64.so", True), ("libsanitizer-collection.so", True), ("libcupti.so.13", False)],
)
def test_profiler_library_in_the_process_is_refused(rank: Starter, tmp_path: Path, library: str, refused: bool) -> None:
    shutil.copy(_ctypes.__file__, tmp_path / library)
    child = gpu_rank(rank, f"ctypes.CDLL('{tmp_path}/{library}')")
    checks = inspect(child, seen(child))[1]
    assert (checks["gpu-profiler"].verdict == Check.REFUSE) is refused
    assert not refused or library in checks["gpu-profiler"].reason


def test_mps_server_on_the_ranks_gpu_is_refused(rank: Starter) -> None:
    child = gpu_rank(rank)
    server = rank("libc.prctl(15, b'nvidia-cuda-mps-server', 0, 0, 0)")
    mine = pb.GpuProcess(pid=child.pids[0], memory_bytes=MIB)
    checks = inspect(child, seen(child, card(0, mine, pb.GpuProcess(pid=server.pid))))[1]
    assert [check.name for check in refusals(checks.values())] == ["gpu-mps"]
    checks = inspect(child, seen(child, card(0, mine), card(1, pb.GpuProcess(pid=server.pid))))[1]
    assert refusals(checks.values()) == []
