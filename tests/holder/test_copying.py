"""Held memory is copied into stripes with a window, as fast as it is sent, also by a process that replaces a dead one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError
from snapshotd.holder import copying, window
from snapshotd.holder.client import Holder
from snapshotd.holder.copying import Copying, stripe_sizes
from snapshotd.holder.driver import chunks
from snapshotd.inprocess.holding import HeldBlock
from tests.fakes.cuda_fake import GpuNode, gpus

MIB = 1 << 20
SLOT_BYTES = MIB + 4096
NAMES = ["device-1-0", "device-1-1", "device-1-2"]
KEY = "m-0123456789ab/1"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "COPIED_AHEAD_BYTES", 6 * MIB)
    monkeypatch.setattr(window, "COPIED_BEHIND_BYTES", 4 * MIB)


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", gpus("node", count=2, memory_mib=1024), context_mib=8)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path / "holder.sock")
    yield holder
    holder.leave("test")
    holder.drop(list(holder.kept()))
    holder.close()


class Sender:
    """Sends all that was copied, until it is told to wait, and notes what may be removed."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.content = folder, [b""] * len(NAMES)
        self.freed = [0] * len(NAMES)
        self.most_bytes = 0
        self.paused = False

    def advance(self, names: Sequence[str], done: Sequence[int]) -> None:
        assert list(names) == NAMES
        for number, size in enumerate(done):
            if self.paused:
                continue
            at = len(self.content[number])
            with open(self.folder / NAMES[number], "rb") as file:
                self.content[number] += os.pread(file.fileno(), size - at, at)
                self.most_bytes = max(self.most_bytes, os.fstat(file.fileno()).st_blocks * 512)

    def position(self, name: str) -> int:
        return len(self.content[NAMES.index(name)])

    def free(self, name: str, size: int) -> None:
        assert size <= self.position(name)
        self.freed[NAMES.index(name)] = size


def hold(holder: Holder, sizes: Sequence[int]) -> tuple[list[HeldBlock], list[bytes]]:
    """Keeps memory with random content; the blocks and their contents."""
    blocks, contents = [], []
    for number, size in enumerate(sizes):
        contents.append(os.urandom(size))
        fd = os.memfd_create("memory")
        os.write(fd, contents[-1])
        blocks.append(HeldBlock(number << 30, size, 0))
        holder.keep(KEY, blocks[-1:], [fd])
        os.close(fd)
    return blocks, contents


def expected(contents: Sequence[bytes], number: int) -> bytes:
    places = [(index << 30, len(content)) for index, content in enumerate(contents)]
    return b"".join(
        contents[address >> 30][address & (2**30 - 1) :][:size]
        for address, size in chunks(places, number, len(NAMES), SLOT_BYTES)
    )


@pytest.fixture
def make(tmp_path: Path, node: GpuNode) -> Any:
    folder = tmp_path / "stripes"
    folder.mkdir()

    def make(gpu: int = 0) -> Copying:
        return Copying(node.gpus[gpu].uuid, folder, NAMES, SLOT_BYTES, tmp_path / "holder.sock", str(node.folder))

    make.folder = folder  # type: ignore[attr-defined]
    return make


async def test_all_memory_is_copied_in_the_layout_of_the_stripes(make: Any, holder: Holder) -> None:
    blocks, contents = hold(holder, [2 * MIB, 8 * MIB, 4 * MIB, 2 * MIB])
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    sender: Any = Sender(make.folder, sizes)
    await copied.start()
    await asyncio.wait_for(copied.begin(KEY, sizes, lambda: sender, sender.advance), 60)
    assert [len(content) for content in sender.content] == sizes
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_files_have_a_window_whatever_the_size_of_the_memory(make: Any, holder: Holder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 12)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    assert min(sizes) > window.COPIED_AHEAD_BYTES + window.COPIED_BEHIND_BYTES
    sender: Any = Sender(make.folder, sizes)
    await copied.start()
    await asyncio.wait_for(copied.begin(KEY, sizes, lambda: sender, sender.advance), 120)
    assert [len(content) for content in sender.content] == sizes
    assert sender.content[1] == expected(contents, 1)
    assert 0 < sender.most_bytes <= window.COPIED_AHEAD_BYTES + window.COPIED_BEHIND_BYTES + 2 * SLOT_BYTES
    assert min(sender.freed) > 0
    await copied.close()


async def test_copying_waits_for_the_sender(make: Any, holder: Holder) -> None:
    blocks, _ = hold(holder, [6 * MIB] * 10)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    sender: Any = Sender(make.folder, sizes)
    sender.paused = True
    await copied.start()
    task = copied.begin(KEY, sizes, lambda: sender, sender.advance)
    async with asyncio.timeout(60):
        while min(copied._done) <= window.COPIED_AHEAD_BYTES - 2 * SLOT_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not task.done()
    assert max(copied._done) <= window.COPIED_AHEAD_BYTES
    sender.paused = False
    sender.advance(NAMES, copied._done)
    await asyncio.wait_for(task, 60)
    assert [len(content) for content in sender.content] == sizes
    await copied.close()


async def test_killed_process_is_replaced_and_goes_on(make: Any, holder: Holder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 10)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    sender: Any = Sender(make.folder, sizes)
    killed: list[int] = []

    def advance(names: Sequence[str], done: Sequence[int]) -> None:
        sender.advance(names, done)
        if sum(done) > sum(sizes) // 2 and not killed:
            killed.append(copied._child.pid)
            os.kill(copied._child.pid, 9)

    await copied.start()
    await asyncio.wait_for(copied.begin(KEY, sizes, lambda: sender, advance), 120)
    assert killed
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_memory_that_is_not_kept_fails(make: Any, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    holder.start("test")
    monkeypatch.setattr(copying, "REPLACED", 0)
    copied = make()
    await copied.start()
    task = copied.begin(KEY, [MIB, 0, 0], lambda: None, lambda names, done: None)
    with pytest.raises(GpuFailed, match=r"0 bytes of .* were copied"):
        await asyncio.wait_for(task, 60)
    await copied.close()


async def test_unknown_gpu_is_an_error(make: Any, tmp_path: Path, node: GpuNode) -> None:
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    copied = Copying(unknown, make.folder, NAMES, SLOT_BYTES, tmp_path / "holder.sock", str(node.folder))
    with pytest.raises(SnapshotError, match="does not list GPU"):
        await copied.start()
    await copied.close()
