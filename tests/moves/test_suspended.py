"""The room that is reserved for a rank whose job is to be suspended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.device import checkpoint_room, cuda_processes, memory, offload
from snapshotd.moves.moving import Moving
from snapshotd.moves.source import suspended
from snapshotd.proc.tree import Process


@pytest.mark.parametrize("gpu", [False, True])
async def test_driver_carries_all_device_memory_and_room_for_it_is_reserved_while_the_rank_runs(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is offloaded: there is no target yet to which stripes could be sent."""
    done: list[object] = []

    async def must_find(*_given: Any) -> list[Process]:
        return [Process(7, 1)]

    async def empty_caches(*_given: Any) -> int:
        return 5

    async def prepare(*_given: Any) -> None:
        done.append("stripes")

    monkeypatch.setattr(cuda_processes, "must_find", must_find)
    monkeypatch.setattr(memory, "empty_caches", empty_caches)
    monkeypatch.setattr(offload, "prepare", prepare)
    monkeypatch.setattr(checkpoint_room, "reserve", lambda _node, move, pid, size, *_: done.append((move, size)))
    store = SimpleNamespace(create=lambda move, size: done.append(("image", move, size)))
    node: Any = SimpleNamespace(store_of=lambda _begin: store, gpus=None, caches_left={})
    log: Any = SimpleNamespace(move="m-1", begin=SimpleNamespace(coordinator="m-record"))
    moving, entry = Moving(log), SimpleNamespace(group=SimpleNamespace(pids=lambda: [7]))
    moving.facts.memory_bytes, moving.facts.carried_bytes = 100, 3
    if gpu:
        moving.facts.gpu.CopyFrom(pb.GpuFacts(device_bytes=60, offloaded_bytes=50))
    await suspended.make_room(node, moving, entry)  # type: ignore[arg-type]
    assert done == [*([("m-1", 60)] if gpu else []), ("image", "m-1", 103)]
    assert moving.facts.gpu.offloaded_bytes == 0
    assert moving.offload is None
