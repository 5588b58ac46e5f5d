"""What a rank must not use if its job is to be suspended."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.nccl import gate_processes
from snapshotd.moves.source import suspended


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("nccl", [False, True])
async def test_gpus_and_communicators_are_refused_by_name(
    gpu: bool, nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(_entries: Any) -> list[Any]:
        return ["a process"] if nccl else []

    monkeypatch.setattr(gate_processes, "find", find)
    facts = pb.RankFacts(gpu=pb.GpuFacts()) if gpu else pb.RankFacts()
    entry: Any = None
    found = await suspended.checks(entry, facts)
    assert [check.name for check in found] == ["suspend-gpu"] * gpu + ["suspend-nccl"] * nccl
    assert all(check.verdict == pb.Check.REFUSE and check.remedy for check in found)
