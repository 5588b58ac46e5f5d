"""GPUs that a node has had since it booted."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda.seen import SeenGpus
from snapshotd.proc import host


def gpu(uuid: str, index: int) -> pb.Gpu:
    return pb.Gpu(uuid=uuid, index=index, name="NVIDIA H200", memory_bytes=141 << 30, memory_free_bytes=1 << 30)


def test_lost_gpu_is_remembered_over_a_restart_of_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    SeenGpus(path).note([gpu("a", 0), gpu("b", 1)])
    after = SeenGpus(path)
    after.note([gpu("a", 0)])
    (lost,) = after.lost([gpu("a", 0)])
    assert (lost.uuid, lost.index, lost.name, lost.lost) == ("b", 1, "NVIDIA H200", True)
    assert lost.memory_free_bytes == 0  # what changes is not remembered
    assert after.lost([gpu("a", 0), gpu("b", 1)]) == []


def test_gpus_of_an_earlier_boot_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpus.json"
    SeenGpus(path).note([gpu("a", 0)])
    monkeypatch.setattr(host, "boot_id", lambda: "another")
    assert SeenGpus(path).lost([]) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"boot_id": "BOOT", "gpus": [{"uuid": 3}]}'])
def test_damaged_memory_is_not_used(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(content.replace("BOOT", host.boot_id()))
    seen = SeenGpus(path)
    assert seen.lost([]) == []
    seen.note([gpu("a", 0)])
    assert len(SeenGpus(path).lost([])) == 1


def test_lost_gpu_is_known_since_when_it_was_first_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that started later never saw it. It may have been lost at any time before, since the last look."""
    path = tmp_path / "gpus.json"
    now_s = [100.0]
    monkeypatch.setattr(host, "boottime_s", lambda: now_s[0])
    seen = SeenGpus(path)
    seen.note([gpu("a", 0), gpu("b", 1)])
    now_s[0] = 200.0
    seen.note([])  # NVML has failed, which says nothing about the GPUs
    now_s[0] = 300.0
    seen.note([gpu("a", 0)])
    now_s[0] = 400.0
    after = SeenGpus(path)  # a restarted daemon
    after.note([gpu("a", 0)])
    (lost,) = after.lost([gpu("a", 0)])
    assert (lost.uuid, lost.missed_since_s) == ("b", 300.0)
    after.note([gpu("a", 0), gpu("b", 1)])  # it is back
    now_s[0] = 500.0
    after.note([gpu("a", 0)])
    assert SeenGpus(path).lost([gpu("a", 0)])[0].missed_since_s == 500.0
