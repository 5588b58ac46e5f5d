"""Memory on the GPU of a target is filled while its stripes arrive, through files with a window, and outlives the process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError
from snapshotd.holder import filling, window
from snapshotd.holder.client import Holder
from snapshotd.holder.driver import chunks
from snapshotd.holder.filling import Filling
from snapshotd.inprocess.holding import HeldBlock
from tests.fakes.cuda_fake import GpuNode, gpus

MIB = 1 << 20
SLOT_BYTES = MIB + 4096
NAMES = ["device-1-0", "device-1-1", "device-1-2"]
KEY = "m-0123456789ab/1"


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "FILLED_BEHIND_BYTES", 4 * MIB)


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", gpus("node", count=2, memory_mib=1024), context_mib=8)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path / "holder.sock")
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
        self.verified = dict.fromkeys(NAMES, 0)
        self.most_bytes = 0
        for name in NAMES:
            (folder / name).touch()

    def arrived(self, name: str) -> int:
        return self.verified[name]

    def arrive(self, name: str, size: int) -> None:
        """So many more bytes."""
        at, content = self.verified[name], self.content[NAMES.index(name)]
        with open(self.folder / name, "r+b") as file:
            os.pwrite(file.fileno(), content[at : at + size], at)
            self.most_bytes = max(self.most_bytes, os.fstat(file.fileno()).st_blocks * 512)
        self.verified[name] = min(at + size, len(content))

    async def arrive_all(self, filled: Filling) -> None:
        """As fast as they are filled."""
        while any(self.verified[name] < len(content) for name, content in zip(NAMES, self.content, strict=True)):
            for number, name in enumerate(NAMES):
                if self.verified[name] - filled.filled[number] < 4 * MIB:
                    self.arrive(name, 3 * MIB + 17)
            await asyncio.sleep(0.002)


def kept(holder: Holder) -> list[tuple[HeldBlock, bytes]]:
    return [
        (block, os.pread(fd, block.bytes, 0))
        for blocks, fds in holder.held(KEY)
        for block, fd in zip(blocks, fds, strict=True)
    ]


@pytest.fixture
def make(tmp_path: Path, node: GpuNode, holder: Holder) -> Any:
    def make(stripes: Stripes, gpu: str = "") -> Filling:
        return Filling(gpu or node.gpus[0].uuid, stripes.folder, NAMES, SLOT_BYTES, holder.path, str(node.folder), KEY)

    return make


async def test_memory_is_filled_while_it_arrives_and_outlives_the_process(
    make: Any, holder: Holder, tmp_path: Path
) -> None:
    stripes = Stripes(tmp_path / "stripes", [2 * MIB, 40 * MIB, 4 * MIB] + [2 * MIB] * 20)
    filled = make(stripes)
    await filled.start()
    task = filled.begin(stripes.blocks, stripes.arrived)
    await asyncio.wait_for(filled.allocated(), 60)
    assert [block for block, _ in kept(holder)] == stripes.blocks, "before anything has arrived"
    assert not task.done()
    arriving = asyncio.create_task(stripes.arrive_all(filled))
    assert await asyncio.wait_for(task, 120) == sum(len(content) for content in stripes.contents)
    await arriving
    await filled.close()
    assert kept(holder) == list(zip(stripes.blocks, stripes.contents, strict=True))
    assert min(len(content) for content in stripes.content) > 20 * MIB
    assert stripes.most_bytes < 16 * MIB, "the files have a window"


async def test_killed_process_is_replaced_and_goes_on(make: Any, holder: Holder, tmp_path: Path) -> None:
    stripes = Stripes(tmp_path / "stripes", [6 * MIB] * 10)
    filled = make(stripes)
    await filled.start()
    first = filled._child.pid
    task = filled.begin(stripes.blocks, stripes.arrived)
    arriving = asyncio.create_task(stripes.arrive_all(filled))
    async with asyncio.timeout(60):
        while sum(filled.filled) < 20 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    os.kill(first, 9)
    await asyncio.wait_for(task, 120)
    await arriving
    assert filled._child.pid != first
    await filled.close()
    assert kept(holder) == list(zip(stripes.blocks, stripes.contents, strict=True))


async def test_lack_of_room_on_the_gpu_is_an_error_before_anything_arrives(
    make: Any, holder: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "REPLACED", 0)
    stripes = Stripes(tmp_path / "stripes", [2 * MIB])
    filled = make(stripes)
    await filled.start()
    filled.begin([HeldBlock(1 << 32, 4096 * MIB, 0)], stripes.arrived)
    with pytest.raises(GpuFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        await asyncio.wait_for(filled.allocated(), 60)
    await filled.close()


async def test_process_without_memory_is_filled_at_once(make: Any, holder: Holder, tmp_path: Path) -> None:
    stripes = Stripes(tmp_path / "stripes", [])
    filled = make(stripes)
    await filled.start()
    assert await asyncio.wait_for(filled.begin([], stripes.arrived), 60) == 0
    await filled.close()


async def test_unknown_gpu_is_an_error(make: Any, tmp_path: Path) -> None:
    filled = make(Stripes(tmp_path / "stripes", []), "GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(SnapshotError, match="does not list GPU"):
        await filled.start()
    await filled.close()
