"""Refilling offloaded device memory: on the source when a move is undone, and on the target."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import (
    Damaged,
    GpuFailed,
    RankGone,
    SnapshotError,
    Timeout,
    Unreachable,
    Where,
)
from snapshotd.inprocess import devmem
from snapshotd.moves.device import checkpoint_room, refill, sharing, stripe_files
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import Journal
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.departure import Departure
from snapshotd.moves.source.dump import Dump
from snapshotd.moves.target import restore
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread
from tests.daemon.offload_doubles import MIB, MOVE, SIZE, Source

# ---------------------------------------------------------------- undo


async def test_undo_drops_what_was_only_prepared(source: Source) -> None:
    await source.prepare()
    await source.back()
    assert source.first.said == ["ready", "cancel", "drop"]


async def test_undo_that_lacks_device_memory_can_be_repeated(source: Source) -> None:
    before = source.first.content
    await source.out()
    source.first.fill_failures = [GpuFailed("CUDA_ERROR_OUT_OF_MEMORY")]
    with pytest.raises(GpuFailed):
        await source.back()
    assert source.first.is_out
    await source.back()
    assert source.first.content == before


async def test_what_can_be_opened_is_open_if_a_parked_thread_blocks_the_rest(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stay parked while memory that they share is closed, and the call would wait for ever."""
    opened: list[int] = []
    monkeypatch.setattr(sharing, "reopen", lambda processes: opened.append(len(processes)))
    await source.out()
    source.first.fill_failures = [Timeout("the call did not return")]
    with pytest.raises(Timeout):
        await source.back()
    assert len(opened) == 1


async def test_abort_before_the_freeze_drops_what_was_prepared(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank was never frozen: it keeps running, and nothing that was prepared is left."""

    async def nothing(*arguments: Any) -> None:
        return

    monkeypatch.setattr(Dump, "sweep", nothing)
    entry = SimpleNamespace(cgroup=str(tmp_path), keeper_alive=lambda: True, link=None, moving=MOVE)
    source.node.ranks, source.node.caches_left = SimpleNamespace(get=lambda uid, role: entry), {MOVE: 1}
    source.log.mark(Mark.BEGUN, cgroup=str(tmp_path))
    await source.prepare()
    source.log.decide(Outcome.ABORT, "an operator asked for it", "driver")
    communicators: Any = SimpleNamespace(put_back=nothing, open_all=nothing)
    await Departure(source.node, communicators).thaw(source.moving)
    assert [memory.said for memory in source.memories.values()] == [["ready", "cancel", "drop"]] * 2
    assert source.channel is not None
    assert source.channel.closed
    assert not (source.node.config.image_dir / "parked").exists()
    assert (source.log.last_mark, entry.moving) == (Mark.SETTLED, "")


async def test_undo_that_cannot_finish_keeps_no_reservation(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for hours until there is room on the GPU again, and other moves need the memory."""

    async def no_room(departure: Departure, moving: Any) -> None:
        raise GpuFailed("there is no room on the GPU")

    monkeypatch.setattr(Departure, "_let_run", no_room)
    process = next(iter(source.memories))
    checkpoint_room.reserve(source.node, MOVE, process.pid, SIZE, "because", Where.SOURCE_RUNNING)
    assert source.node.room.free().reserved_bytes == SIZE
    communicators: Any = SimpleNamespace()
    with pytest.raises(GpuFailed, match="no room"):
        await Departure(source.node, communicators).thaw(source.moving)
    assert source.node.room.free().reserved_bytes == 0


async def test_undo_continues_if_a_drop_fails(source: Source, caplog: Any) -> None:
    """Nothing is offloaded: the rank continues, even if something that was prepared remains."""

    def hang() -> None:
        raise Timeout("the driver hangs")

    await source.prepare()
    source.first.drop = hang  # type: ignore[method-assign]
    await source.back()
    assert source.second.said[-1] == "drop"
    assert "the driver hangs" in caplog.text


async def test_undo_continues_if_one_process_has_ended(source: Source) -> None:
    def gone(timeout_s: float) -> int:
        raise RankGone("process 1 has ended")

    await source.out()
    source.first.fill = gone  # type: ignore[method-assign]
    await source.back()
    assert not source.second.is_out


@pytest.mark.parametrize("at_home", [True, False])
async def test_refill_uses_the_stripes_of_the_offload_not_the_defaults(
    source: Source, monkeypatch: pytest.MonkeyPatch, at_home: bool
) -> None:
    """The daemon that refills may have another version, or run on a node with more cores."""
    before = source.first.content
    processes, device, folder = await offloaded_there(source)
    monkeypatch.setattr(devmem, "STRIPES", devmem.STRIPES + 1)
    monkeypatch.setattr(devmem, "SLOT_BYTES", 2 * devmem.SLOT_BYTES)
    if at_home:
        await source.back()
    else:
        await refill.on_target(processes, device, folder, None, Parts())
    assert source.first.content == before


async def test_offloaded_memory_without_its_files_is_lost(source: Source) -> None:
    await source.out()
    stripe_files.sweep(source.node.config.image_dir, MOVE)
    with pytest.raises(Lost):
        await source.back()


async def test_stripe_files_of_ended_moves_are_removed(source: Source, tmp_path: Path) -> None:
    images = source.node.config.image_dir
    await source.out()
    stripe_files.make_folder(images, "m-00000000000f")
    stripe_files.sweep_ended(images, Journal(tmp_path / "state"))
    assert sorted(os.listdir(images / "parked")) == [MOVE]
    source.log.decide(Outcome.ABORT, "", "test")
    source.log.mark(Mark.SETTLED)
    stripe_files.sweep_ended(images, Journal(tmp_path / "state"))
    assert not (images / "parked").exists()


# ---------------------------------------------------------------- the target


def test_image_bytes_count_only_files_that_criu_reads(tmp_path: Path) -> None:
    others = ("carry-0", "device-1-0", "device-1-0.done", "follow-device-1-0", "ahead-pages-7-1.img")
    for name in ("pages-1.img", "core-1.img", "ahead-pages-8-1.img", *others):
        (tmp_path / name).write_bytes(os.urandom(MIB))
    assert 3 * MIB <= restore._image_bytes(tmp_path, {"ahead-pages-7-1.img"}) < 3 * MIB + (64 << 10)


class Arriving:
    """Stripes that have arrived when `wait` returns."""

    def __init__(self, sizes: Mapping[str, int], failure: SnapshotError | None = None) -> None:
        self.sizes, self.failure = sizes, failure
        self.failed: SnapshotError | None = None

    async def wait(self, timeout_s: float) -> Mapping[str, int]:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self.sizes


async def offloaded_there(source: Source) -> tuple[dict[int, Process], list[OffloadedMemory], Path]:
    """Offloads on the source, and returns its processes and files as if they were the target's."""
    await source.out()
    device = source.log.record.offloaded
    return (
        {one.pid: process for one, process in zip(device, source.memories, strict=True)},
        device,
        stripe_files.folder_of(source.node.config.image_dir, MOVE),
    )


def sizes_of(device: Sequence[OffloadedMemory]) -> dict[str, int]:
    return {name: size for one in device for name, size in zip(one.stripes, one.bytes, strict=True)}


@pytest.mark.parametrize("beside", [True, False])
async def test_target_refills_device_memory(source: Source, beside: bool) -> None:
    before = [memory.content for memory in source.memories.values()]
    processes, device, folder = await offloaded_there(source)
    parts = Parts()
    incoming: Any = Arriving(sizes_of(device)) if beside else None
    await refill.on_target(processes, device, folder, incoming, parts)
    assert [memory.content for memory in source.memories.values()] == before
    assert [(part.name, part.bytes) for part in parts.all] == [("refill", 2 * SIZE)]


def shorter(sizes: dict[str, int]) -> Any:
    return Arriving({**sizes, next(iter(sizes)): 1})


def lost(sizes: dict[str, int]) -> Any:
    return Arriving(sizes, Unreachable("the connection is lost"))


@pytest.mark.parametrize(("how", "error"), [(shorter, Damaged), (lost, Unreachable)])
async def test_incomplete_stripes_fail_the_refill(
    source: Source, how: Callable[[dict[str, int]], Any], error: type[SnapshotError]
) -> None:
    processes, device, folder = await offloaded_there(source)
    with pytest.raises(error):
        await refill.on_target(processes, device, folder, how(sizes_of(device)), Parts())


@pytest.mark.parametrize("early", [True, False], ids=["before the fill", "just as it begins"])
async def test_cancelled_fill_does_not_wait_for_stripes(source: Source, early: bool) -> None:
    """Also if the fill had not begun when it was cancelled."""
    processes, device, folder = await offloaded_there(source)
    asked, cancelled = threading.Event(), threading.Event()
    ended: list[str] = []

    class Lost(Arriving):
        async def wait(self, timeout_s: float) -> Mapping[str, int]:
            await in_thread(asked.wait)
            raise Unreachable("the connection is lost")

    def ready(stripes: Sequence[int], slot_bytes: int) -> int:
        asked.set()
        if early:
            ended.append("ready" if cancelled.wait(60) else "never cancelled")
        return 0

    def fill(timeout_s: float) -> int:
        cancelled.wait(60)  # a cancellation from before the fill is forgotten
        cancelled.clear()
        ended.append("fill" if cancelled.wait(60) else "never cancelled")
        raise GpuFailed("cancelled")

    first: Any = source.first
    first.ready, first.fill, first.cancel = ready, fill, cancelled.set
    with pytest.raises(Unreachable, match="the connection is lost"):
        await refill.on_target(processes, device, folder, Lost({}), Parts())  # type: ignore[arg-type]
    assert ended in ([["ready"]] if early else [["fill"], []])  # []: cancelled just before


@pytest.mark.parametrize(("how", "whole"), [("all", True), ("none", False), ("short", False), ("not said", False)])
async def test_stripes_must_be_complete_after_a_restart_of_the_daemon(source: Source, how: str, whole: bool) -> None:
    _, device, folder = await offloaded_there(source)
    for name, size in sizes_of(device).items():
        (folder / f"{name}.done").write_text(json.dumps({"size": size}))
    first = folder / device[0].stripes[0]
    match how:
        case "none":
            first.unlink()
        case "short":
            os.truncate(first, 4096)
        case "not said":
            first.with_name(f"{first.name}.done").unlink()
    with contextlib.nullcontext() if whole else pytest.raises(Unreachable, match=first.name):
        refill.must_be_here(folder, device)


async def test_failed_channel_fills_nothing(source: Source) -> None:
    processes, device, folder = await offloaded_there(source)
    incoming: Any = Arriving({})
    incoming.failed = Unreachable("the connection is lost")
    with pytest.raises(Unreachable, match="the connection is lost"):
        await refill.on_target(processes, device, folder, incoming, Parts())
    assert "fill" not in source.first.said


async def test_target_without_free_device_memory_fails_the_refill(source: Source) -> None:
    processes, device, folder = await offloaded_there(source)
    source.second.fill_failures = [GpuFailed("CUDA_ERROR_OUT_OF_MEMORY")]
    with pytest.raises(GpuFailed, match="OUT_OF_MEMORY"):
        await refill.on_target(processes, device, folder, None, Parts())


async def test_copy_whose_memory_did_not_arrive_fails_the_refill(source: Source) -> None:
    processes, _, folder = await offloaded_there(source)
    with pytest.raises(GpuFailed, match="did not come"):
        await refill.on_target(processes, [], folder, None, Parts())
