"""The room that is reserved for a rank whose job is to be suspended."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Where
from snapshotd.inprocess.shimctl import Emptied
from snapshotd.moves.device import checkpoint_room, cuda_processes, memory, offload
from snapshotd.moves.moving import Moving
from snapshotd.moves.source import suspended
from snapshotd.proc.tree import Process


class Stripes:
    expected_bytes = 50

    def must_fit(self, _pid: int, _where: Where) -> None:
        """The driver's checkpoint carries the rest."""


@pytest.mark.parametrize(
    ("gpu", "stripes", "done"),
    [
        (False, None, [("image", "m-1", 103)]),
        (True, None, ["stripes", ("checkpoint", "m-1", 60), ("image", "m-1", 103)]),
        (True, Stripes(), ["stripes", ("image", "m-1", 103)]),
    ],
)
async def test_room_for_device_memory_is_reserved_while_the_rank_runs(
    gpu: bool, stripes: Stripes | None, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be offloaded, the driver's checkpoint carries all of it."""
    seen: list[object] = []

    async def must_find(*_given: Any) -> list[Process]:
        return [Process(7, 1)]

    async def empty_caches(*_given: Any) -> Emptied:
        return Emptied(5)

    async def prepare(*_given: Any) -> Stripes | None:
        seen.append("stripes")
        return stripes

    def reserve(_node: Any, move: str, _pid: int, size: int, *_given: Any) -> None:
        seen.append(("checkpoint", move, size))

    monkeypatch.setattr(cuda_processes, "must_find", must_find)
    monkeypatch.setattr(memory, "empty_caches", empty_caches)
    monkeypatch.setattr(offload, "prepare", prepare)
    monkeypatch.setattr(checkpoint_room, "reserve", reserve)
    config = SimpleNamespace(carry_closed_bytes=0)
    store = SimpleNamespace(
        create=lambda move, size: seen.append(("image", move, size)), threads=lambda _move: contextlib.nullcontext()
    )
    node: Any = SimpleNamespace(store_of=lambda _begin: store, gpus=None, caches_left={}, config=config)
    log: Any = SimpleNamespace(move="m-1", begin=SimpleNamespace(coordinator="m-record", kind=""))
    moving, entry = Moving(log), SimpleNamespace(group=SimpleNamespace(pids=lambda: [7]))
    moving.facts.memory_bytes, moving.facts.carried_bytes = 100, 3
    if gpu:
        moving.facts.gpu.CopyFrom(pb.GpuFacts(device_bytes=60, offloaded_bytes=55))
    await suspended.make_room(node, moving, entry)  # type: ignore[arg-type]
    assert seen == done
    assert moving.facts.gpu.offloaded_bytes == (50 if stripes else 0)
