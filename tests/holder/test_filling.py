"""Memory on the GPU of a target is filled while its stripes arrive, through rings, and outlives the process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError
from snapshotd.holder import filling
from snapshotd.holder.backed import BackedHolder
from snapshotd.holder.driver import chunks
from snapshotd.holder.filling import Filling
from snapshotd.inprocess.holding import HeldBlock
from tests.fakes.cuda_fake import GpuNode, gpus
from tests.transport.device.channel import new_ring

MIB = 1 << 20
SLOT_BYTES = MIB + 4096
NAMES = ["device-1-0", "device-1-1", "device-1-2"]
KEY = "m-0123456789ab/1"


RING_BYTES = 8 * MIB


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", gpus("node", count=2, memory_mib=1024), context_mib=8)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BackedHolder]:
    holder = BackedHolder(tmp_path / "holder.sock")
    holder.start("test")
    yield holder
    holder.leave("test")
    holder.drop(list(holder.kept()))
    holder.close()


class Stripes:
    """Blocks with random content, as they arrive in stripes."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        folder.mkdir()
        self.folder = folder
        self.blocks = [HeldBlock((number + 1) << 32, size, 0) for number, size in enumerate(sizes)]
        self.contents = [os.urandom(size) for size in sizes]
        places = [(number << 32, size) for number, size in enumerate(sizes)]
        self.content = [
            b"".join(
                self.contents[address >> 32][address & (2**32 - 1) :][:size]
                for address, size in chunks(places, number, len(NAMES), SLOT_BYTES)
            )
            for number in range(len(NAMES))
        ]
        self.rings = [new_ring(folder / name, RING_BYTES) for name in NAMES]

    def arrive(self, number: int, size: int) -> None:
        """So many more bytes, as far as there is room."""
        ring, content = self.rings[number], self.content[number]
        at = ring.written
        end = min(at + size, len(content), ring.released + ring.bytes)
        ring.begin(end)
        for offset, address, length in ring.pieces(at, end - at):
            ring.view(address - ring.address, length)[:] = content[at + offset : at + offset + length]
        ring.wrote(end)

    async def arrive_all(self) -> None:
        """As fast as they are filled."""
        while any(ring.written < len(content) for ring, content in zip(self.rings, self.content, strict=True)):
            for number in range(len(NAMES)):
                self.arrive(number, 3 * MIB + 17)
            await asyncio.sleep(0.002)


def kept(holder: BackedHolder) -> list[tuple[HeldBlock, bytes]]:
    return [
        (block, os.pread(fd, block.bytes, 0))
        for blocks, fds in holder.held(KEY)
        for block, fd in zip(blocks, fds, strict=True)
    ]


@pytest.fixture
def make(tmp_path: Path, node: GpuNode, holder: BackedHolder) -> Any:
    def make(stripes: Stripes, gpu: str = "") -> Filling:
        return Filling(gpu or node.gpus[0].uuid, stripes.folder, NAMES, SLOT_BYTES, holder, str(node.folder), KEY)

    return make


async def test_memory_is_filled_while_it_arrives_and_outlives_the_process(
    make: Any, holder: BackedHolder, tmp_path: Path
) -> None:
    stripes = Stripes(tmp_path / "stripes", [2 * MIB, 40 * MIB, 4 * MIB] + [2 * MIB] * 20)
    filled = make(stripes)
    await filled.start()
    task = filled.begin(stripes.blocks)
    await asyncio.wait_for(filled.allocated(), 60)
    assert [block for block, _ in kept(holder)] == stripes.blocks, "before anything has arrived"
    assert not task.done()
    arriving = asyncio.create_task(stripes.arrive_all())
    assert await asyncio.wait_for(task, 120) == sum(len(content) for content in stripes.contents)
    await arriving
    await filled.close()
    assert kept(holder) == list(zip(stripes.blocks, stripes.contents, strict=True))
    assert min(len(content) for content in stripes.content) > 2 * RING_BYTES


async def test_killed_process_is_replaced_and_goes_on(make: Any, holder: BackedHolder, tmp_path: Path) -> None:
    stripes = Stripes(tmp_path / "stripes", [6 * MIB] * 10)
    filled = make(stripes)
    await filled.start()
    first = filled._child.pid
    task = filled.begin(stripes.blocks)
    arriving = asyncio.create_task(stripes.arrive_all())
    async with asyncio.timeout(60):
        while sum(ring.released for ring in stripes.rings) < 20 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    os.kill(first, 9)
    await asyncio.wait_for(task, 120)
    await arriving
    assert filled._child.pid != first
    await filled.close()
    assert kept(holder) == list(zip(stripes.blocks, stripes.contents, strict=True))


async def test_holder_that_is_killed_before_anything_is_filled_is_replaced(
    make: Any, holder: BackedHolder, tmp_path: Path
) -> None:
    stripes = Stripes(tmp_path / "stripes", [2 * MIB] * 20)
    filled = make(stripes)
    await filled.start()
    os.kill(holder.pid, 9)
    task = filled.begin(stripes.blocks)
    await asyncio.wait_for(filled.allocated(), 60)
    await asyncio.wait_for(asyncio.gather(task, stripes.arrive_all()), 120)
    await filled.close()
    assert kept(holder) == list(zip(stripes.blocks, stripes.contents, strict=True))


async def test_holder_that_is_killed_when_some_is_filled_is_an_error(
    make: Any, holder: BackedHolder, tmp_path: Path
) -> None:
    """Nothing else keeps it, and what has arrived does not arrive again: the move is undone."""
    stripes = Stripes(tmp_path / "stripes", [6 * MIB] * 10)
    filled = make(stripes)
    await filled.start()
    task = filled.begin(stripes.blocks)
    arriving = asyncio.create_task(stripes.arrive_all())
    async with asyncio.timeout(60):
        while sum(ring.released for ring in stripes.rings) < 20 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    os.kill(holder.pid, 9)
    os.kill(filled._child.pid, 9)
    with pytest.raises(GpuFailed, match="0 blocks are kept, 10 were created"):
        await asyncio.wait_for(task, 120)
    arriving.cancel()
    await filled.close()
    assert holder.kept() == {}


async def test_lack_of_room_on_the_gpu_is_an_error_before_anything_arrives(
    make: Any, holder: BackedHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "REPLACED", 0)
    stripes = Stripes(tmp_path / "stripes", [2 * MIB])
    filled = make(stripes)
    await filled.start()
    filled.begin([HeldBlock(1 << 32, 4096 * MIB, 0)])
    with pytest.raises(GpuFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        await asyncio.wait_for(filled.allocated(), 60)
    await filled.close()


async def test_process_without_memory_is_filled_at_once(make: Any, holder: BackedHolder, tmp_path: Path) -> None:
    stripes = Stripes(tmp_path / "stripes", [])
    filled = make(stripes)
    await filled.start()
    assert await asyncio.wait_for(filled.begin([]), 60) == 0
    await filled.close()


async def test_unknown_gpu_is_an_error(make: Any, tmp_path: Path) -> None:
    filled = make(Stripes(tmp_path / "stripes", []), "GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(SnapshotError, match="does not list GPU"):
        await filled.start()
    await filled.close()
