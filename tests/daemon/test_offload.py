"""Offloading device memory: what is retried, and what is left to the driver's checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import (
    Full,
    GpuFailed,
    SnapshotError,
    Unreachable,
    Where,
    WrongState,
)
from snapshotd.inprocess import devmem
from snapshotd.inprocess.devmem import Caught, TooSmall
from snapshotd.moves.device import checkpoint_room, offload, stripe_files
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import freeze
from snapshotd.moves.source.dump import Dump
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES
from snapshotd.proc.tree import Process
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.image.frame import IMAGE_NAME
from tests.daemon.offload_doubles import MIB, MOVE, SIZE, Channel, Memory, Source


async def test_all_device_memory_is_offloaded_and_refilled(source: Source) -> None:
    before = [memory.content for memory in source.memories.values()]
    size, parts = await source.out()
    assert size == 2 * SIZE
    assert parts == {"unlock": 0, "offload": 2 * SIZE, "relock": 0}
    assert source.channel is not None
    assert source.channel.final == source.channel.sizes
    assert sum(source.channel.final.values()) == 2 * SIZE
    device = source.log.record.offloaded
    assert [one.total_bytes for one in device] == [SIZE, SIZE]
    assert source.log.record.offloaded_bytes == 2 * SIZE
    await source.back()
    assert [memory.content for memory in source.memories.values()] == before


async def test_stripe_files_are_journalled_before_a_process_gets_them(source: Source) -> None:
    noted = []

    def ready(stripes: Sequence[int], slot_bytes: int) -> int:
        noted.append(source.log.record.striped_processes)
        return 0

    source.first.ready = ready  # type: ignore[method-assign]
    await source.prepare()
    assert all(stripe_files.NAME.fullmatch(name) for one in noted[0] for name in one.stripes)
    assert [one.process for one in noted[0]] == [Process(each.pid, each.start_ticks) for each in source.memories]


async def test_preparation_is_done_once(source: Source) -> None:
    """Nor is it counted as a part of a later step."""
    processes, parts, later = list(source.memories), Parts(), Parts()
    await freeze._prepare(source.node, source.moving, processes, parts)
    await freeze._prepare(source.node, source.moving, processes, later)
    assert source.first.said == ["ready"]
    assert [part.name for part in parts.all] == ["prepare"]
    assert not later.all


async def test_small_memory_is_left_to_the_driver(source: Source) -> None:
    source.second.content = b"x" * MIB
    size, _ = await source.out()
    assert (size, source.second.said) == (SIZE, [])


async def test_thread_parked_in_an_allocation_is_released_and_parked_again(source: Source) -> None:
    again = offload.TRIES - 1
    source.second.failures = [Caught("in cudaMalloc")] * again
    size, _ = await source.out()
    assert size == 2 * SIZE
    assert source.let_go == [source.second.process] * again
    assert source.stopped_others == again  # it may have forked meanwhile
    assert source.first.said == ["ready", "offload"]
    assert source.second.said == ["ready", *["offload"] * offload.TRIES]


@pytest.mark.parametrize("sharer", [0, 1])
async def test_no_process_is_released_while_others_of_the_rank_share_memory(source: Source, sharer: int) -> None:
    """What they share is closed: a process that runs for a moment could free it, or open more."""
    source.sharing.add(list(source.memories)[sharer])
    source.second.failures = [Caught("in cudaMalloc")]
    with pytest.raises(GpuFailed, match="gpu-ipc: a thread is in the middle of a call into CUDA"):
        await source.out()
    assert source.let_go == []


async def test_process_that_fails_after_a_retry_is_left_to_the_driver(source: Source) -> None:
    """What was prepared for it may have become invalid when its threads were released."""
    source.second.failures = [Caught("in cudaMalloc"), GpuFailed("it is not ready any more")]
    size, _ = await source.out()
    assert (size, source.second.said[-1]) == (SIZE, "drop")
    assert not source.second.is_out


async def test_process_parked_in_an_allocation_every_time_is_left_to_the_driver(source: Source) -> None:
    source.second.failures = [Caught("in cudaMalloc")] * offload.TRIES
    size, _ = await source.out()
    assert (size, source.second.said[-1]) == (SIZE, "drop")
    assert [one.pid for one in source.log.record.offloaded] == [source.moving.offload.striped[0].inner_pid]  # type: ignore[union-attr]
    assert any(f"{offload.TRIES} times in a row in cudaMalloc" in warning for warning in source.moving.offload.warnings)  # type: ignore[union-attr]
    assert source.channel is not None
    assert set(source.channel.final) == set(source.channel.sizes)


async def test_copy_that_fails_with_all_memory_on_the_gpu_is_left_to_the_driver(source: Source) -> None:
    for memory in source.memories.values():
        memory.failures = [GpuFailed("CUDA_ERROR_UNKNOWN")]
    size, _ = await source.out()
    assert (size, source.log.record.offloaded) == (0, [])
    assert source.channel is not None
    assert source.channel.final == dict.fromkeys(source.channel.sizes, 0)
    assert len(source.moving.offload.warnings) == 2  # type: ignore[union-attr]


async def test_stripe_files_left_to_the_driver_take_no_room(source: Source) -> None:
    """The driver copies into the same memory. A sender of bytes that were copied before the failure still finds the file."""

    def failing(timeout_s: float) -> int:
        os.pwrite(source.second.fds[0], b"x" * MIB, 0)
        source.second.written = [MIB, *[0] * (devmem.STRIPES - 1)]
        raise GpuFailed("CUDA_ERROR_UNKNOWN")

    source.second.offload = failing  # type: ignore[method-assign]
    await source.out()
    folder, names = (
        stripe_files.folder_of(source.node.config.image_dir, MOVE),
        source.log.record.striped_processes[1].stripes,
    )
    assert [(folder / name).stat().st_blocks for name in names] == [0] * len(names)
    assert (folder / names[0]).stat().st_size >= MIB


async def test_target_is_notified_that_no_stripes_come(source: Source) -> None:
    def fails(stripes: Sequence[int], slot_bytes: int) -> int:
        raise GpuFailed("CUDA_ERROR_OUT_OF_MEMORY")

    source.second.ready = fails  # type: ignore[method-assign]
    await source.out()
    assert source.channel is not None
    assert source.channel.final == dict.fromkeys(source.channel.sizes, 0)
    assert source.channel.closed


async def test_concurrent_offloads_do_not_take_the_same_room(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * SIZE + 2 * devmem.STRIPES * devmem.SLOT_BYTES + RESERVE_BYTES
    folder = source.node.config.image_dir / "parked"

    def left() -> tuple[str, int]:
        taken: list[int] = []
        for path, _, names in os.walk(folder):  # the folder of the one that is refused disappears
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    taken.append(os.stat(os.path.join(path, name)).st_blocks * 512)
        return "this node", needed + MIB - sum(taken)

    monkeypatch.setattr(source.node.room._own, "tightest", left)
    begin = msgspec.structs.replace(source.log.begin, move="m-00000000000f")
    other = Moving(Journal(tmp_path / "other").begin(begin))
    other.log.mark(Mark.BEGUN)
    processes = list(source.memories)
    prepared = await asyncio.gather(
        *(offload.prepare(source.node, moving.log, processes, 0) for moving in (source.moving, other))
    )
    warned = [text for one in prepared if one is not None for text in one.warnings]
    assert len(warned) == 1
    assert "this node has" in warned[0]
    assert source.node.room.free().reserved_bytes == 0


async def test_memory_taken_while_files_are_allocated_leaves_all_to_the_driver(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stripe_files.folder_of(source.node.config.image_dir, MOVE)

    def left() -> tuple[str, int]:
        reserved = f"stripes of {MOVE}" in source.node.room._reserved
        return ("this node", FLOOR_BYTES - 1 if reserved else 1 << 40)

    monkeypatch.setattr(source.node.room._own, "tightest", left)
    size, _ = await source.out()
    assert (size, source.first.said) == (0, ["drop"])
    assert "only 128 MiB of memory left" in source.moving.offload.warnings[0]  # type: ignore[union-attr]
    assert not folder.exists()
    assert source.node.room.free().reserved_bytes == 0
    source.moving.offload.must_fit(source.first.process.pid, Where.SOURCE_RUNNING)  # type: ignore[union-attr]
    assert source.node.room.free().reserved_bytes == 2 * SIZE, "for the driver's checkpoint"


async def test_failure_with_memory_offloaded_fails_the_move(source: Source) -> None:
    def failing(timeout_s: float) -> int:
        Memory.offload(source.first, timeout_s)
        raise GpuFailed("the ring was not freed")

    source.first.offload = failing  # type: ignore[method-assign]
    with pytest.raises(GpuFailed, match="the ring"):
        await source.out()
    await source.back()
    assert not source.first.is_out


@pytest.mark.parametrize("refusal", [Unreachable("no route"), None])
async def test_stripe_files_follow_the_image_without_a_device_memory_channel(
    source: Source, refusal: SnapshotError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*arguments: Any, encrypted: bool, rings: bool = False) -> Channel:
        raise Unreachable("the port is shut")

    source.refusal = refusal
    monkeypatch.setattr(Outgoing, "open", unreachable)
    size, _ = await source.out()
    assert size == 2 * SIZE
    assert not source.moving.offload.has_channel  # type: ignore[union-attr]
    assert "follows the image" in source.moving.offload.warnings[0]  # type: ignore[union-attr]


async def test_target_of_an_older_version_gets_the_stripes_with_the_image(source: Source) -> None:
    source.sealed = False
    size, _ = await source.out()
    assert size == 2 * SIZE
    assert source.channel is None
    assert "follows the image" in source.moving.offload.warnings[0]  # type: ignore[union-attr]
    assert "older version" in source.moving.offload.warnings[0]  # type: ignore[union-attr]


async def test_files_that_follow_the_image_have_distinct_names(source: Source) -> None:
    """A channel that failed may have written half of a stripe at the target, and may still be writing."""
    await source.out()
    assert source.channel is not None
    source.channel.failed = Unreachable("a child was killed")
    entry: Any = None
    dump = Dump(source.node, source.log, entry, pb.RankFacts(), source.moving.offload)
    assert dump.progress().bytes_sent == 2 * SIZE
    device, files, by_channel = await dump._device()
    assert not by_channel
    assert source.channel.closed
    assert dump.progress().bytes_sent == 0  # the files are sent again, with the image
    assert [name for one in device for name in one.stripes] == list(files)
    assert not set(files) & set(source.channel.sizes)
    assert {path.name for path in files.values()} == set(source.channel.sizes)
    assert all(IMAGE_NAME.fullmatch(name) for name in files)
    assert [one.bytes for one in device] == [one.bytes for one in source.log.record.offloaded]


async def test_target_without_offload_support_leaves_all_to_the_driver(source: Source) -> None:
    """It could not refill files that follow the image, either."""
    source.refusal = UnknownMethod("node b does not know OpenDeviceChannel")
    size, _ = await source.out()
    assert (size, source.first.said) == (0, ["drop"])
    assert not stripe_files.folder_of(source.node.config.image_dir, MOVE).exists()


async def test_lack_of_room_leaves_all_to_the_driver(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.node.store, "room_bytes", lambda: SIZE)
    size, _ = await source.out()
    assert (size, source.first.said) == (0, ["drop"])
    assert "MiB are free" in source.moving.offload.warnings[0]  # type: ignore[union-attr]
    assert not stripe_files.folder_of(source.node.config.image_dir, MOVE).exists()


async def test_memory_beyond_the_jobs_limits_is_not_left_to_the_driver(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.second.failures = [GpuFailed("CUDA_ERROR_UNKNOWN")]
    monkeypatch.setattr(checkpoint_room, "memory_room", lambda pid: [("cgroup /job", SIZE)])
    with pytest.raises(Full, match="cgroup /job leaves 64 MiB"):
        await source.out()


async def test_silent_process_is_left_to_the_driver_if_there_is_room(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(process: Process) -> Any:
        raise GpuFailed("another version of the shim")

    monkeypatch.setattr(devmem, "find", silent)
    source.moving.facts.gpu.offloaded_bytes = 2 * SIZE
    size, _ = await source.out()
    assert size == 0
    assert "another version of the shim" in source.moving.offload.warnings[0]  # type: ignore[union-attr]
    monkeypatch.setattr(checkpoint_room, "memory_room", lambda pid: [("cgroup /job", SIZE)])
    with pytest.raises(Full, match="needs 128 MiB"):
        source.moving.offload.must_fit(source.first.process.pid, Where.SOURCE_RUNNING)  # type: ignore[union-attr]


async def test_memory_reserved_for_another_move_is_not_left_to_the_driver(source: Source) -> None:
    source.second.failures = [GpuFailed("CUDA_ERROR_UNKNOWN")]
    await source.prepare()
    source.node.room.count("another move", lambda: 1 << 50)
    with pytest.raises(Full, match="reserved for other moves"):
        await source.moving.offload.out(source.driver, list(source.memories), Parts(), source._stop_others)  # type: ignore[union-attr]


async def test_process_with_offloaded_memory_is_not_frozen_again(source: Source) -> None:
    source.first.is_out = True
    with pytest.raises(WrongState, match="interrupted"):
        await source.prepare()


async def test_stripe_files_are_enlarged_for_memory_that_grew(source: Source) -> None:
    """Pages that the job's own writes add to a file would count against its memory limit."""
    real = source.first.offload
    asked: list[list[int]] = []

    def grown(timeout_s: float) -> int:
        asked.append([os.fstat(fd).st_size for fd in source.first.fds])
        if len(asked) == 1:
            raise TooSmall(SIZE + 64 * MIB, 48 * MIB)
        return real(timeout_s)

    source.first.offload = grown  # type: ignore[method-assign]
    size, _ = await source.out()
    assert size == 2 * SIZE
    assert min(asked[1]) >= 48 * MIB > max(asked[0])


async def test_process_that_ended_after_the_preparation_is_skipped(source: Source) -> None:
    first, second = source.memories
    parking = await source.prepare()
    source.driver.states.pop(second, None)
    size = await parking.out(source.driver, [first], Parts(), source._stop_others)
    assert size == SIZE
    assert [one.process for one in parking.striped] == [first]


async def test_target_is_notified_if_all_processes_have_ended(source: Source) -> None:
    """They ended after the preparation: the target is notified that no stripes come."""
    parking = await source.prepare()
    assert await parking.out(source.driver, [], Parts(), source._stop_others) == 0
    assert source.channel is not None
    assert source.channel.final == dict.fromkeys(source.channel.sizes, 0)


@pytest.mark.parametrize("refused", [False, True])
async def test_channel_that_broke_before_the_freeze_is_reopened(source: Source, refused: bool) -> None:
    parking = await source.prepare()
    first = source.channel
    assert first is not None
    first.failed = Unreachable("the connection ended unexpectedly")
    source.refusal = Unreachable("node b does not answer") if refused else None
    await parking.reopen_channel()
    assert first.closed
    assert parking.has_channel is not refused
    assert any("opened again" in warning for warning in parking.warnings)
    assert await parking.out(source.driver, list(source.memories), Parts(), source._stop_others) == 2 * SIZE
