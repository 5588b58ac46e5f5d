"""Offloaded device memory: what is retried, what is left to the driver's checkpoint, and how it is refilled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import NotSpoken
from snapshotd.api.errors import (
    Damaged,
    Full,
    GpuFailed,
    RankGone,
    SnapshotError,
    Timeout,
    Unreachable,
    Where,
    WrongState,
)
from snapshotd.cuda.driver import State
from snapshotd.inprocess import devmem
from snapshotd.inprocess.devmem import Caught, TooSmall
from snapshotd.moves.device import offload, refill, standstill, stripe_files
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin, OffloadedMemory
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source import freeze
from snapshotd.moves.source.departure import Departure
from snapshotd.moves.source.dump import Dump
from snapshotd.moves.target import restore
from snapshotd.preflight.gpu_checks import RESERVE_BYTES
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.image.frame import IMAGE_NAME
from snapshotd.transport.image.store import ImageStore

MOVE = "m-0123456789ab"
MIB = 1 << 20
SIZE = 64 * MIB


class Memory:
    """The device memory of a process; records the operations on it."""

    def __init__(self, process: Process, size: int = SIZE) -> None:
        self.process, self.content = process, os.urandom(1024) * (size // 1024)
        self.is_out = self.lost = False
        self.fds: list[int] = []
        self.written: list[int] = []
        self.slot_bytes = 0
        self.failures: list[Exception] = []  # of `offload`, one per call
        self.fill_failures: list[Exception] = []
        self.said: list[str] = []

    def size(self) -> int:
        return len(self.content)

    def offloaded(self) -> bool:
        return self.is_out

    def ready(self, stripes: Sequence[int], slot_bytes: int) -> int:
        self.said.append("ready")
        if self.is_out:
            assert (len(stripes), slot_bytes) == (len(self.written), self.slot_bytes)
        self.slot_bytes = slot_bytes
        self._close()
        self.fds = [os.dup(fd) for fd in stripes]
        return len(self.content)

    def offload(self, timeout_s: float) -> int:
        self.said.append("offload")
        if self.failures:
            if not isinstance(self.failures[0], Caught):
                self._close()
            raise self.failures.pop(0)
        share = len(self.content) // len(self.fds)
        for number, fd in enumerate(self.fds):
            assert os.pwrite(fd, self.content[number * share : (number + 1) * share], 0) == share
            os.ftruncate(fd, share)
        self.written = [share] * len(self.fds)
        self._close()
        self.is_out, self.content = True, b""
        return sum(self.written)

    def fill(self, timeout_s: float) -> int:
        self.said.append("fill")
        assert self.is_out
        if self.fill_failures:
            self._close()
            raise self.fill_failures.pop(0)
        self.content = b"".join(os.pread(fd, os.fstat(fd).st_size, 0) for fd in self.fds)
        self._close()
        self.is_out = False
        return len(self.content)

    def done(self) -> Sequence[int]:
        return self.written

    def cancel(self) -> None:
        self.said.append("cancel")

    def drop(self) -> None:
        self.said.append("drop")
        self._close()

    def _close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Lane:
    """The device-memory channel to the target; records the bytes that were sent of each stripe."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.sizes = folder, dict.fromkeys(names, 0)
        self.final: dict[str, int] = {}
        self.failed: SnapshotError | None = None
        self.closed = False

    @property
    def sent_bytes(self) -> int:
        return sum(self.sizes.values())

    def advance(self, name: str, size: int) -> None:
        self.sizes[name] = max(size, self.sizes[name])

    def finish(self, sizes: Mapping[str, int]) -> None:
        assert set(sizes) == set(self.sizes)
        self.final = dict(sizes)

    async def wait(self) -> Any:
        return SimpleNamespace(sent=self.sent_bytes)

    async def close(self) -> None:
        self.closed = True


class Driver:
    """Locks and unlocks processes. Memory can be copied only while its process is unlocked."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.states = dict.fromkeys(processes, State.LOCKED)

    async def lock(self, process: Process, timeout_s: float) -> None:
        self.states[process] = State.LOCKED

    async def unlock(self, process: Process, timeout_s: float) -> None:
        self.states[process] = State.RUNNING


class Source:
    """A source with two processes that have device memory, and a target that may refuse to open a channel."""

    def __init__(self, folder: Path, processes: Sequence[Process], monkeypatch: pytest.MonkeyPatch) -> None:
        self.memories = {process: Memory(process) for process in processes}
        self.driver: Any = Driver(processes)
        self.refusal: SnapshotError | None = None
        self.lane: Lane | None = None
        self.let_go: list[Process] = []
        self.stopped_others = 0
        store = ImageStore(folder / "images")
        config = SimpleNamespace(image_dir=folder / "images", device_channel="encrypted")
        self.node: Any = SimpleNamespace(config=config, store=store, client=self._client, taking_room=asyncio.Lock())
        begin = Begin(
            MOVE, "source", "job-0", "job", 0, "a", "a:1", "b", "b:1", "00" * 32, host.boot_id(), 1.0, lease_s=30.0
        )
        self.log = Journal(folder / "state").begin(begin)
        self.log.mark(Mark.BEGUN)
        self.moving = Moving(self.log)
        monkeypatch.setattr(devmem, "find", self.memories.get)
        monkeypatch.setattr(Outgoing, "open", self._outgoing)
        monkeypatch.setattr(standstill, "let_go", self._let_go)
        monkeypatch.setattr(standstill, "still", self._still)

    @property
    def first(self) -> Memory:
        return next(iter(self.memories.values()))

    @property
    def second(self) -> Memory:
        return list(self.memories.values())[1]

    @asynccontextmanager
    async def _client(self, name: str, endpoint: str) -> Any:
        async def open_device_channel(
            request: pb.OpenDeviceChannelRequest, timeout_s: float
        ) -> pb.OpenDeviceChannelReply:
            assert request.names
            if self.refusal is not None:
                raise self.refusal
            return pb.OpenDeviceChannelReply(port=1, key=b"key")

        yield SimpleNamespace(target=SimpleNamespace(OpenDeviceChannel=open_device_channel))

    async def _outgoing(self, *arguments: Any, encrypted: bool) -> Lane:
        assert encrypted
        self.lane = Lane(arguments[4], arguments[5])
        return self.lane

    async def _let_go(self, processes: Sequence[Process]) -> None:
        assert not any(self.memories[process].is_out for process in processes)
        self.let_go += processes

    async def _still(self, gpus: Any, processes: Sequence[Process], parking: Any, parts: Parts) -> None:
        for process in processes:
            await self.driver.lock(process, 1.0)

    async def _stop_others(self) -> None:
        self.stopped_others += 1

    async def prepare(self) -> offload.Offload:
        preflight_bytes = int(self.moving.facts.gpu.offloaded_bytes)
        self.moving.offload = await offload.prepare(self.node, self.log, list(self.memories), preflight_bytes)
        assert self.moving.offload is not None
        return self.moving.offload

    async def out(self) -> tuple[int, dict[str, int]]:
        """The bytes that were offloaded, and the bytes of each part."""
        parts = Parts()
        size = await (await self.prepare()).out(self.driver, list(self.memories), parts, self._stop_others)
        assert set(self.driver.states.values()) == {State.LOCKED}
        return size, {part.name: part.bytes for part in parts.all}

    async def back(self) -> None:
        await refill.on_source(self.node.config.image_dir, self.log)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    running = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield Source(tmp_path, [Process.of(each.pid) for each in running], monkeypatch)
    for each in running:
        each.kill()
        each.wait()


async def test_all_device_memory_is_offloaded_and_refilled(source: Source) -> None:
    before = [memory.content for memory in source.memories.values()]
    size, parts = await source.out()
    assert size == 2 * SIZE
    assert parts == {"unlock": 0, "offload": 2 * SIZE, "relock": 0}
    assert source.lane is not None
    assert source.lane.final == source.lane.sizes
    assert sum(source.lane.final.values()) == 2 * SIZE
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
    assert source.lane is not None
    assert set(source.lane.final) == set(source.lane.sizes)


async def test_copy_that_fails_with_all_memory_on_the_gpu_is_left_to_the_driver(source: Source) -> None:
    for memory in source.memories.values():
        memory.failures = [GpuFailed("CUDA_ERROR_UNKNOWN")]
    size, _ = await source.out()
    assert (size, source.log.record.offloaded) == (0, [])
    assert source.lane is not None
    assert source.lane.final == dict.fromkeys(source.lane.sizes, 0)
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
    assert source.lane is not None
    assert source.lane.final == dict.fromkeys(source.lane.sizes, 0)
    assert source.lane.closed


async def test_concurrent_offloads_do_not_take_the_same_room(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * SIZE + 2 * devmem.STRIPES * devmem.SLOT_BYTES + RESERVE_BYTES
    folder = source.node.config.image_dir / "parked"

    def room() -> int:
        taken: list[int] = [file.stat().st_blocks * 512 for file in folder.glob("*/*")]
        return needed + MIB - sum(taken)

    monkeypatch.setattr(source.node.store, "room_bytes", room)
    begin = msgspec.structs.replace(source.log.begin, move="m-00000000000f")
    other = Moving(Journal(tmp_path / "other").begin(begin))
    other.log.mark(Mark.BEGUN)
    processes = list(source.memories)
    prepared = await asyncio.gather(
        *(offload.prepare(source.node, moving.log, processes, 0) for moving in (source.moving, other))
    )
    warned = [text for one in prepared if one is not None for text in one.warnings]
    assert len(warned) == 1
    assert "MiB are free" in warned[0]


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
    async def unreachable(*arguments: Any, encrypted: bool) -> Lane:
        raise Unreachable("the port is shut")

    source.refusal = refusal
    monkeypatch.setattr(Outgoing, "open", unreachable)
    size, _ = await source.out()
    assert size == 2 * SIZE
    assert not source.moving.offload.has_channel  # type: ignore[union-attr]
    assert "follows the image" in source.moving.offload.warnings[0]  # type: ignore[union-attr]


async def test_files_that_follow_the_image_have_distinct_names(source: Source) -> None:
    """A channel that failed may have written half of a stripe at the target, and may still be writing."""
    await source.out()
    assert source.lane is not None
    source.lane.failed = Unreachable("a child was killed")
    entry: Any = None
    dump = Dump(source.node, source.log, entry, pb.RankFacts(), source.moving.offload)
    assert dump.progress().bytes_sent == 2 * SIZE
    device, files = await dump._device()
    assert source.lane.closed
    assert dump.progress().bytes_sent == 0  # the files are sent again, with the image
    assert [name for one in device for name in one.stripes] == list(files)
    assert not set(files) & set(source.lane.sizes)
    assert {path.name for path in files.values()} == set(source.lane.sizes)
    assert all(IMAGE_NAME.fullmatch(name) for name in files)
    assert [one.bytes for one in device] == [one.bytes for one in source.log.record.offloaded]


async def test_target_without_offload_support_leaves_all_to_the_driver(source: Source) -> None:
    """It could not refill files that follow the image, either."""
    source.refusal = NotSpoken("node b does not know OpenDeviceChannel")
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
    monkeypatch.setattr(offload, "memory_room", lambda pid: [("cgroup /job", SIZE)])
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
    monkeypatch.setattr(offload, "memory_room", lambda pid: [("cgroup /job", SIZE)])
    with pytest.raises(Full, match="needs 128 MiB"):
        source.moving.offload.must_fit(source.first.process.pid, Where.SOURCE_RUNNING)  # type: ignore[union-attr]


async def test_process_with_offloaded_memory_is_not_frozen_again(source: Source) -> None:
    source.first.is_out = True
    with pytest.raises(WrongState, match="interrupted"):
        await source.prepare()


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
    assert source.lane is not None
    assert source.lane.closed
    assert not (source.node.config.image_dir / "parked").exists()
    assert (source.log.last_mark, entry.moving) == (Mark.SETTLED, "")


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
    processes, device, folder = await parked_there(source)
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
    for name in ("pages-1.img", "core-1.img", "carry-0", "device-1-0", "device-1-0.done", "follow-device-1-0"):
        (tmp_path / name).write_bytes(os.urandom(MIB))
    assert 2 * MIB <= restore._image_bytes(tmp_path) < 2 * MIB + (64 << 10)


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


async def parked_there(source: Source) -> tuple[dict[int, Process], list[OffloadedMemory], Path]:
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
    processes, device, folder = await parked_there(source)
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
    processes, device, folder = await parked_there(source)
    with pytest.raises(error):
        await refill.on_target(processes, device, folder, how(sizes_of(device)), Parts())


@pytest.mark.parametrize("early", [True, False], ids=["before the fill", "just as it begins"])
async def test_cancelled_fill_does_not_wait_for_stripes(source: Source, early: bool) -> None:
    """Also if the fill had not begun when it was cancelled."""
    processes, device, folder = await parked_there(source)
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
    _, device, folder = await parked_there(source)
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
    processes, device, folder = await parked_there(source)
    incoming: Any = Arriving({})
    incoming.failed = Unreachable("the connection is lost")
    with pytest.raises(Unreachable, match="the connection is lost"):
        await refill.on_target(processes, device, folder, incoming, Parts())
    assert "fill" not in source.first.said


async def test_target_without_free_device_memory_fails_the_refill(source: Source) -> None:
    processes, device, folder = await parked_there(source)
    source.second.fill_failures = [GpuFailed("CUDA_ERROR_OUT_OF_MEMORY")]
    with pytest.raises(GpuFailed, match="OUT_OF_MEMORY"):
        await refill.on_target(processes, device, folder, None, Parts())


async def test_copy_whose_memory_did_not_arrive_fails_the_refill(source: Source) -> None:
    processes, _, folder = await parked_there(source)
    with pytest.raises(GpuFailed, match="did not come"):
        await refill.on_target(processes, [], folder, None, Parts())


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
    assert source.lane is not None
    assert source.lane.final == dict.fromkeys(source.lane.sizes, 0)


@pytest.mark.parametrize("refused", [False, True])
async def test_channel_that_broke_before_the_freeze_is_reopened(source: Source, refused: bool) -> None:
    parking = await source.prepare()
    first = source.lane
    assert first is not None
    first.failed = Unreachable("the connection ended unexpectedly")
    source.refusal = Unreachable("node b does not answer") if refused else None
    await parking.reopen_channel()
    assert first.closed
    assert parking.has_channel is not refused
    assert any("opened again" in warning for warning in parking.warnings)
    assert await parking.out(source.driver, list(source.memories), Parts(), source._stop_others) == 2 * SIZE
