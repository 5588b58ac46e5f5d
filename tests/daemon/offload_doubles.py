"""A source with processes that have device memory, for the tests of offloading and refilling."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    SnapshotError,
)
from snapshotd.cuda.driver import State
from snapshotd.holder.backed import BackedHolder
from snapshotd.inprocess import devmem, sharing
from snapshotd.inprocess.devmem import Caught
from snapshotd.moves.device import offload, refill, standstill
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import Journal
from snapshotd.moves.moving import Moving
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.proc import host
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process
from snapshotd.transport.device.outgoing import Outgoing
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


class Channel:
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
        #: Called when the source asks for a channel, with whether its files are rings.
        self.opening: Callable[[bool], None] = lambda held: None
        self.sealed = True
        self.channel: Channel | None = None
        self.let_go: list[Process] = []
        self.stopped_others = 0
        room = Room(folder / "memory", "a")
        store = ImageStore(folder / "images", room=room)
        config = SimpleNamespace(
            image_dir=folder / "images",
            device_channel="encrypted",
            hold_device_memory=False,
            hand_over_device_memory=True,
            data_addresses=(),
        )
        holder = BackedHolder(folder / "holder.sock")
        self.node: Any = SimpleNamespace(
            config=config, store=store, client=self._client, room=room, holder=holder, credentials=None
        )
        begin = Begin(
            MOVE, "source", "job-0", "job", 0, "a", "a:1", "b", "b:1", "00" * 32, host.boot_id(), 1.0, lease_s=30.0
        )
        self.log = Journal(folder / "state").begin(begin)
        self.log.mark(Mark.BEGUN)
        self.moving = Moving(self.log)
        monkeypatch.setattr(devmem, "find", self.memories.get)
        self.sharing: set[Process] = set()
        self.outside: set[Process] = set()  # those of whose memory a process of another rank has got some
        monkeypatch.setattr(sharing, "find", self._find_shared)
        monkeypatch.setattr(Outgoing, "open", self._outgoing)
        monkeypatch.setattr(standstill, "let_go", self._let_go)
        monkeypatch.setattr(standstill, "still", self._still)

    def _find_shared(self, process: Process) -> Any:
        exports = int(process in self.sharing)
        outside = process in self.outside
        state = SimpleNamespace(
            exports=exports, moving_exports=exports, imports=0, shared_closed=False, shared_outside=outside, parked=True
        )
        return SimpleNamespace(process=process, state=lambda: state)

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
            self.opening(bool(request.slot_bytes))
            if self.refusal is not None:
                raise self.refusal
            return pb.OpenDeviceChannelReply(port=1, key=b"key", sealed=self.sealed)

        yield SimpleNamespace(target=SimpleNamespace(OpenDeviceChannel=open_device_channel))

    async def _outgoing(self, *arguments: Any, encrypted: bool, rings: bool = False) -> Channel:
        assert encrypted
        self.channel = Channel(arguments[4], arguments[5])
        return self.channel

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
        await refill.on_source(self.node.config.image_dir, self.log, self.node.holder)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    running = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield Source(tmp_path, [Process.of(each.pid) for each in running], monkeypatch)
    for each in running:
        each.kill()
        each.wait()
