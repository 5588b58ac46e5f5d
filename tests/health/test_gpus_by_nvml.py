"""The GPUs' health through a real helper process, over the stand-in of NVML."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotd.health import gpus as health
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Now, Unable
from snapshotd.health.gpus import Gpus
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters
from tests.fakes.cuda_fake import GpuNode, gpus

_seconds = itertools.count(1)


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "gpus", gpus("sick", count=2))


@pytest.fixture
async def group(tmp_path: Path, node: GpuNode) -> AsyncIterator[Gpus]:
    made = Gpus(tmp_path, node.library_dir, Settings(), Counters())
    yield made
    await made.close()


async def read(group: Gpus) -> list[Signal]:
    return await group.read(Now(0.0, float(next(_seconds) * 1000)))


async def test_a_healthy_node_is_quiet(node: GpuNode, group: Gpus) -> None:
    node.change(0, nvlinks=4)
    assert [await read(group) for _ in range(3)] == [[], [], []]


async def test_faults_of_one_gpu_are_reported_for_it(node: GpuNode, group: Gpus) -> None:
    node.change(1, nvlinks=4)
    await read(group)
    node.change(1, ecc_uncorrected=3, remap_failed=True, nvlink_errors=500, pcie_replays=200)
    found = await read(group)
    assert [(signal.check, signal.severity, signal.value) for signal in found] == [
        ("gpu-ecc", Severity.CRITICAL, 3.0),
        ("gpu-remap", Severity.CRITICAL, 0.0),
        ("gpu-pcie", Severity.WARNING, 200.0),
        ("gpu-nvlink", Severity.WARNING, 500.0),
    ]
    assert {signal.subject for signal in found} == {f"gpu:{node.gpus[1].uuid}"}
    node.change(1, remap_failed=False, nvlinks_down=0b10)
    assert await read(group) == []
    (down,) = await read(group)
    assert (down.check, down.severity) == ("gpu-nvlink", Severity.CRITICAL)


async def test_a_lost_gpu_is_named_and_the_other_one_is_still_read(node: GpuNode, group: Gpus) -> None:
    await read(group)
    node.change(0, lost=True)
    node.change(1, ecc_uncorrected=1)
    found = {signal.check: signal for signal in await read(group)}
    assert found["gpu-lost"].subject == f"gpu:{node.gpus[0].uuid}"
    assert "lost" in found["gpu-lost"].text.lower()
    assert found["gpu-ecc"].subject == f"gpu:{node.gpus[1].uuid}"


async def test_addresses_of_pci_lead_to_gpus(tmp_path: Path, node: GpuNode, group: Gpus) -> None:
    information = tmp_path / "proc/driver/nvidia/gpus/0000:11:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: NVIDIA H200\nGPU UUID: {node.gpus[1].uuid}\n")
    assert (group.at("0000:10:00"), group.at("0000:11:00")) == ("", node.gpus[1].uuid)
    await read(group)
    assert (group.at("0000:10:00"), group.at("0000:99:00")) == (node.gpus[0].uuid, "")


async def test_nvml_that_hangs_is_critical_on_a_node_that_had_gpus(
    node: GpuNode, group: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(group)
    monkeypatch.setattr(health, "READ_LIMIT_S", 0.5)
    node.fault("nvml", "hang")
    now = Now(0.0, 1e9)
    (silent,) = await group.read(now)
    assert (silent.check, silent.subject, silent.severity) == ("gpu-lost", "host", Severity.CRITICAL)
    with pytest.raises(Unable, match="did not answer"):
        await group.read(now)
    monkeypatch.setattr(health, "READ_LIMIT_S", 60.0)
    assert await group.read(Now(0.0, 1e9 + health.AGAIN_S)) == []


async def test_without_a_driver_it_is_unable(tmp_path: Path, node: GpuNode, group: Gpus) -> None:
    node.fault("nvml", "fail:9")
    with pytest.raises(Unable, match="Driver Not Loaded"):
        await read(group)
    assert await read(group) == []
    nothing = Gpus(tmp_path, str(tmp_path), Settings(), Counters())
    with pytest.raises(Unable, match=r"no libnvidia-ml\.so\.1"):
        await nothing.read(Now(0.0, 0.0))
    await nothing.close()
