"""Device memory that a target takes over from the source's holder: only that of its move, from a holder, as described."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, Full, GpuFailed, WrongState
from snapshotd.holder.backed import BackedHolder
from snapshotd.holder.client import Holder
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import takeover
from snapshotd.moves.device.takeover import TakeOver
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.moves.target import device_memory
from snapshotd.proc.tree import Process

pytestmark = pytest.mark.root

MOVE, OTHER = "m-0123456789ab", "m-ba9876543210"
KEY = f"{MOVE}/4711"
GPU = "GPU-00000000-0000-0000-0000-000000000001"
BLOCKS = [HeldBlock(number << 32, 4096 * number, 0) for number in range(1, 40)]


class Nodes:
    """The holders of a source and a target, and the files that stand for device memory."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = (BackedHolder(folder / name) for name in ("source.sock", "target.sock"))
        for one in (self.source, self.target):
            one.start("test")
        self.files = [os.memfd_create(str(block.address)) for block in BLOCKS]
        for at in range(0, len(BLOCKS), 16):
            self.source.keep(KEY, BLOCKS[at : at + 16], self.files[at : at + 16])

    @property
    def holder(self) -> Process:
        return Process.of(self.source.pid)

    def take_over(self, holder: Process | None = None) -> TakeOver:
        node: Any = SimpleNamespace(holder=self.target)
        return TakeOver(node, MOVE, holder or self.holder)

    def close(self) -> None:
        for one in (self.source, self.target):
            one.leave("test")
            one.leave(MOVE)
            one.drop(list(one.kept()))
            one.close()
        for file in self.files:
            os.close(file)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


async def test_the_very_memory_is_kept_by_both_until_one_lets_it_go(nodes: Nodes) -> None:
    taking = nodes.take_over()
    await taking.start()
    for _ in range(2):  # an answer that was lost
        await taking.allocate(7, BLOCKS, KEY)
        found = [
            (block, os.fstat(fd).st_ino)
            for blocks, fds in nodes.target.held(f"{MOVE}/to-7")
            for block, fd in zip(blocks, fds, strict=True)
        ]
        assert found == [(block, os.fstat(file).st_ino) for block, file in zip(BLOCKS, nodes.files, strict=True)]
    assert nodes.source.kept() == {KEY: sum(block.bytes for block in BLOCKS)}
    await taking.close()
    assert nodes.target.kept() == {}
    assert nodes.source.count(KEY) == len(BLOCKS)


@pytest.mark.parametrize("key", [f"{OTHER}/4711", f"{MOVE}/to-7", f"{MOVE}/", "", f"{MOVE}/4711/1", f"{MOVE}/4711\n"])
async def test_memory_of_another_move_is_not_taken(nodes: Nodes, key: str) -> None:
    nodes.source.keep(f"{OTHER}/4711", BLOCKS[:1], nodes.files[:1])
    nodes.source.keep(f"{MOVE}/to-7", BLOCKS[:1], nodes.files[:1])
    with pytest.raises(Denied, match="is not memory of move"):
        await nodes.take_over().allocate(7, BLOCKS[:1], key)
    assert nodes.target.kept() == {}


async def test_memory_that_was_described_otherwise_is_not_given(nodes: Nodes) -> None:
    taking = nodes.take_over()
    for blocks in (BLOCKS[:-1], [*BLOCKS[:-1], HeldBlock(BLOCKS[-1].address, 1, 0)], []):
        with pytest.raises(GpuFailed, match="not the"):
            await taking.allocate(7, blocks, KEY)
    one = OffloadedMemory(7, ["device-7-0"], [sum(block.bytes for block in BLOCKS)], 1 << 20)
    with pytest.raises(GpuFailed, match="was not taken over"):
        await taking.give({}, [one], 1.0)
    await taking.close()
    assert nodes.target.kept() == {}


async def test_take_over_that_comes_after_the_end_of_its_move_keeps_nothing(nodes: Nodes) -> None:
    taking = nodes.take_over()
    await taking.start()
    await taking.close()
    with pytest.raises(WrongState, match="has ended here"):
        await taking.allocate(7, BLOCKS, KEY)
    assert nodes.target.kept() == {}


async def test_take_over_during_which_its_move_ends_keeps_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source has not waited for it, and the move is undone."""
    taking = nodes.take_over()
    await taking.start()
    kept, closed = threading.Event(), threading.Event()
    held = Holder.held

    def slowly(holder: Holder, key: str) -> Iterator[tuple[list[HeldBlock], list[int]]]:
        for batch in held(holder, key):
            yield batch
            kept.set()
            assert closed.wait(60)

    monkeypatch.setattr(Holder, "held", slowly)
    late = asyncio.create_task(taking.allocate(7, BLOCKS, KEY))
    assert await asyncio.to_thread(kept.wait, 60)
    assert nodes.target.kept(), "part of it"
    await taking.close()
    closed.set()
    with pytest.raises(WrongState, match="has ended here"):
        await late
    assert nodes.target.kept() == {}
    assert nodes.source.count(KEY) == len(BLOCKS)


async def test_only_a_holder_is_asked(nodes: Nodes, tmp_path: Path) -> None:
    assert takeover.reaches(nodes.holder)
    assert not takeover.reaches(Process(nodes.holder.pid, nodes.holder.start_ticks + 1))
    assert not takeover.reaches(Process.of(os.getpid()))
    # Its arguments are those of a holder, and name the socket of one.
    words = [
        sys.executable,
        "-c",
        "import sys; sys.stdin.read()",
        "-m",
        "snapshotd.holder.process",
        str(nodes.source.path),
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as pretender:
        taking = nodes.take_over(Process.of(pretender.pid))
        assert not takeover.reaches(Process.of(pretender.pid))
        with pytest.raises(Denied, match="does not answer"):
            await taking.allocate(7, BLOCKS, KEY)
        pretender.kill()
    assert nodes.target.kept() == {}


@pytest.mark.parametrize(("free_mib", "fits"), [(100, True), (99, False)])
async def test_shared_gpu_must_have_room_for_memory_that_is_not_taken_over(free_mib: int, fits: bool) -> None:
    """Before the freeze: the source puts it into files then, which leave the GPU."""
    cards = [pb.Gpu(uuid=GPU, memory_free_bytes=free_mib << 20), pb.Gpu(uuid="GPU-2", memory_free_bytes=1 << 40)]

    async def inventory(*, fresh: bool) -> Any:
        assert fresh
        return SimpleNamespace(gpus=cards)

    node: Any = SimpleNamespace(gpus=SimpleNamespace(inventory=inventory))
    with contextlib.nullcontext() if fits else pytest.raises(Full, match="99 MiB free, and 100 MiB"):
        await device_memory._must_fit_twice(node, GPU, 100 << 20)


def node_of(nodes: Nodes, *, allows: bool = True) -> Any:
    return SimpleNamespace(
        holder=nodes.target,
        room=SimpleNamespace(machine="0a1b"),
        config=SimpleNamespace(hand_over_device_memory=allows),
    )


def request(nodes: Nodes, **more: Any) -> pb.OpenDeviceChannelRequest:
    holder = pb.ProcessId(pid=nodes.holder.pid, start_ticks=nodes.holder.start_ticks)
    return pb.OpenDeviceChannelRequest(**{"machine": "0a1b", "gpu": GPU, "holder": holder, **more})


async def test_memory_is_taken_over_on_the_same_gpu_of_the_same_machine_alone(nodes: Nodes) -> None:
    may = device_memory._may_take_over
    assert await may(node_of(nodes), request(nodes), GPU)
    assert not await may(node_of(nodes, allows=False), request(nodes), GPU)
    assert not await may(node_of(nodes), request(nodes), GPU[:-1] + "2")
    assert not await may(node_of(nodes), request(nodes, machine="ffff"), GPU)
    assert not await may(node_of(nodes), request(nodes, machine=""), GPU), "the source does not offer it"
    gone = pb.ProcessId(pid=nodes.holder.pid, start_ticks=1)
    assert not await may(node_of(nodes), request(nodes, holder=gone), GPU)
