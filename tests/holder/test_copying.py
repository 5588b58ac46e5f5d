"""Held memory is copied into rings, as fast as they are emptied, also by a process that replaces a dead one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError
from snapshotd.holder import copying
from snapshotd.holder.backed import BackedHolder
from snapshotd.holder.copying import Copying, stripe_sizes
from snapshotd.holder.driver import chunks
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.transport.device import ring
from snapshotd.transport.device.ring import Ring
from tests.fakes.cuda_fake import GpuNode, gpus

MIB = 1 << 20
SLOT_BYTES = MIB + 4096
NAMES = ["device-1-0", "device-1-1", "device-1-2"]
KEY = "m-0123456789ab/1"


RING_BYTES, BEHIND_BYTES = 12 * MIB, 4 * MIB


@pytest.fixture(autouse=True)
def small_part_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BEHIND_BYTES", BEHIND_BYTES)


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path / "node", gpus("node", count=2, memory_mib=1024), context_mib=8)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BackedHolder]:
    holder = BackedHolder(tmp_path / "holder.sock")
    yield holder
    holder.leave("test")
    holder.drop(list(holder.kept()))
    holder.close()


class Sender:
    """Reads all that is in the rings once it is told of them, unless it is paused."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.sizes = folder, sizes
        self.content = [b""] * len(NAMES)
        self.paused = False
        self._rings: list[Ring] = []

    def advance(self, names: Sequence[str], done: Sequence[int]) -> None:
        assert list(names) == NAMES
        assert sum(done)

    @property
    def rings(self) -> list[Ring]:
        self._rings = self._rings or [Ring(str(self.folder / name)) for name in NAMES]
        return self._rings

    def written(self) -> list[int]:
        return [one.written for one in self.rings]

    def read(self) -> None:
        for number, one in enumerate(self.rings):
            at, end = len(self.content[number]), one.written
            for offset, address, size in one.pieces(at, end - at):
                begin = address - one.address
                self.content[number] += one.view(begin, size)
                assert at + offset + size == len(self.content[number])
            assert one.still_has(at), "overwritten before it was read"
            assert one.still_has(max(0, at - BEHIND_BYTES)), "what a broken connection may have lost was overwritten"
            one.release(end)

    async def run(self) -> None:
        while [len(content) for content in self.content] != list(self.sizes):
            if not self.paused:
                self.read()
            await asyncio.sleep(0.001)


def hold(holder: BackedHolder, sizes: Sequence[int]) -> tuple[list[HeldBlock], list[bytes]]:
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
def make(tmp_path: Path, node: GpuNode, holder: BackedHolder) -> Any:
    folder = tmp_path / "stripes"
    folder.mkdir()

    def make(*, whole: bool = False) -> Copying:
        for name in NAMES:
            if not whole:
                ring.create(str(folder / name), RING_BYTES)
        place = folder, NAMES, SLOT_BYTES, holder, str(node.folder)
        return Copying(node.gpus[0].uuid, *place, whole=whole)

    make.folder = folder  # type: ignore[attr-defined]
    return make


async def copied_and_read(copied: Copying, sizes: Sequence[int], sender: Sender) -> None:
    reading = asyncio.create_task(sender.run())
    await asyncio.wait_for(copied.begin(KEY, sizes, sender.advance), 120)
    await asyncio.wait_for(reading, 60)


async def test_all_memory_is_copied_in_the_layout_of_the_stripes(make: Any, holder: BackedHolder) -> None:
    blocks, contents = hold(holder, [2 * MIB, 8 * MIB, 4 * MIB, 2 * MIB])
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    await copied.start()
    sender = Sender(make.folder, sizes)
    await copied_and_read(copied, sizes, sender)
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_files_have_one_size_whatever_the_size_of_the_memory(make: Any, holder: BackedHolder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 12)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    assert min(sizes) > 1.5 * RING_BYTES
    await copied.start()
    before = [(make.folder / name).stat().st_blocks * 512 for name in NAMES]
    sender = Sender(make.folder, sizes)
    await copied_and_read(copied, sizes, sender)
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    assert [(make.folder / name).stat().st_blocks * 512 for name in NAMES] == before, "allocated before the freeze"
    assert max(before) < RING_BYTES + MIB
    await copied.close()


async def test_copying_waits_for_the_sender(make: Any, holder: BackedHolder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 10)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    await copied.start()
    sender = Sender(make.folder, sizes)
    sender.paused = True
    task = copied.begin(KEY, sizes, sender.advance)
    reading = asyncio.create_task(sender.run())
    async with asyncio.timeout(60):
        while min(sender.written()) <= RING_BYTES - 3 * SLOT_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not task.done()
    assert max(sender.written()) <= RING_BYTES
    sender.paused = False
    await asyncio.wait_for(asyncio.gather(task, reading), 60)
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_killed_process_is_replaced_and_goes_on(make: Any, holder: BackedHolder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 10)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make()
    await copied.start()
    sender = Sender(make.folder, sizes)
    first = copied._child.pid

    async def kill() -> None:
        while sum(map(len, sender.content)) < sum(sizes) // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        os.kill(first, 9)

    killing = asyncio.create_task(kill())
    await copied_and_read(copied, sizes, sender)
    await killing
    assert copied._child.pid != first
    assert sender.content == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_killed_process_that_writes_whole_files_is_replaced_and_goes_on(make: Any, holder: BackedHolder) -> None:
    blocks, contents = hold(holder, [6 * MIB] * 10)
    sizes, copied = stripe_sizes(blocks, len(NAMES), SLOT_BYTES), make(whole=True)
    first: list[int] = []

    def advance(names: Sequence[str], done: Sequence[int]) -> None:
        if not first:
            first.append(copied._child.pid)
            os.kill(first[0], 9)

    await copied.start()
    await asyncio.wait_for(copied.begin(KEY, sizes, advance), 120)
    assert copied._child.pid != first[0]
    found = [(make.folder / name).read_bytes() for name in NAMES]
    assert found == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_copying_goes_on_when_the_holder_is_killed(make: Any, holder: BackedHolder, whole: bool) -> None:
    """Before the process that copies has asked it, and when its successor asks."""
    blocks, contents = hold(holder, [6 * MIB] * 10)
    sizes, copied, sender = (
        stripe_sizes(blocks, len(NAMES), SLOT_BYTES),
        make(whole=whole),
        Sender(make.folder, [0] * 3),
    )
    await copied.start()
    killed = [copied._child.pid]

    def advance(names: Sequence[str], done: Sequence[int]) -> None:
        if copied._child.pid in killed:
            killed.clear()
            os.kill(holder.pid, 9)
            os.kill(copied._child.pid, 9)

    os.kill(holder.pid, 9)
    if whole:
        await asyncio.wait_for(copied.begin(KEY, sizes, advance), 120)
        found = [(make.folder / name).read_bytes() for name in NAMES]
    else:
        sender.sizes, sender.advance = sizes, advance  # type: ignore[method-assign]
        await copied_and_read(copied, sizes, sender)
        found = sender.content
    assert not killed
    assert found == [expected(contents, number) for number in range(len(NAMES))]
    await copied.close()


async def test_memory_that_is_not_kept_fails(make: Any, holder: BackedHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    holder.start("test")
    monkeypatch.setattr(copying, "REPLACED", 0)
    copied = make()
    await copied.start()
    task = copied.begin(KEY, [MIB, 0, 0], lambda names, done: None)
    with pytest.raises(GpuFailed, match=r"0 bytes of .* were copied"):
        await asyncio.wait_for(task, 60)
    await copied.close()


async def test_ring_that_would_wait_for_ever_is_an_error(
    make: Any, holder: BackedHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BEHIND_BYTES", RING_BYTES - 2 * SLOT_BYTES)
    copied = make()
    with pytest.raises(SnapshotError, match="a ring of 12582912 bytes"):
        await copied.start()
    await copied.close()


async def test_unknown_gpu_is_an_error(make: Any, holder: BackedHolder, node: GpuNode) -> None:
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    copied = Copying(unknown, make.folder, NAMES, SLOT_BYTES, holder, str(node.folder))
    with pytest.raises(SnapshotError, match="does not list GPU"):
        await copied.start()
    await copied.close()
