"""Memory that a target fills while stripes arrive: a failure reaches the source, and nothing outlives the move."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, Internal, SnapshotError, WrongState
from snapshotd.holder import filling
from snapshotd.holder.backed import BackedHolder
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import hold
from snapshotd.moves.device.fills import Fills
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark
from snapshotd.moves.target.device_channels import DeviceChannels
from snapshotd.proc import host
from tests.fakes.cuda_fake import GpuNode, gpus
from tests.transport.device.channel import new_ring

MOVE = "m-0123456789ab"
MIB = 1 << 20
NAMES = ["device-7-0", "device-7-1"]
BLOCKS = [HeldBlock(1 << 32, 4 * MIB, 0), HeldBlock(2 << 32, 2 * MIB, 0)]


class Arriving:
    """The target's end of the channel."""

    def __init__(self) -> None:
        self.failed: SnapshotError | None = None
        self.closed = False

    def fail(self, error: SnapshotError) -> None:
        self.failed = self.failed or error

    async def close(self) -> None:
        self.closed = True


class Target:
    def __init__(self, folder: Path) -> None:
        self.gpus = GpuNode(folder / "gpus", gpus("node", count=1, memory_mib=64), context_mib=8)
        self.holder = BackedHolder(folder / "holder.sock")
        self.stripes = folder / "stripes"
        self.stripes.mkdir()
        for name in NAMES:
            new_ring(self.stripes / name, 4 * MIB)
        self.arriving = Arriving()
        self.node: Any = SimpleNamespace(
            holder=self.holder, config=SimpleNamespace(gpu_library_dir=str(self.gpus.folder))
        )

    def fills(self, gpu: str = "") -> Fills:
        arriving: Any = self.arriving
        return Fills(self.node, MOVE, gpu or self.gpus.gpus[0].uuid, self.stripes, NAMES, MIB, arriving)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(filling, "REPLACED", 0)
    target = Target(tmp_path)
    target.holder.start("test")
    yield target
    target.holder.leave("test")
    target.holder.leave(MOVE)
    target.holder.drop(list(target.holder.kept()))
    target.holder.close()


async def until_failed(target: Target) -> SnapshotError:
    async with asyncio.timeout(60):
        while target.arriving.failed is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return target.arriving.failed


async def test_lack_of_room_ends_the_channel_and_leaves_nothing(target: Target) -> None:
    fills = target.fills()
    await fills.start()
    await fills.allocate(7, [HeldBlock(number << 32, 16 * MIB, 0) for number in range(1, 40)], "")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in (await until_failed(target)).message
    await fills.close()
    assert target.holder.kept() == {}


async def test_defect_while_filling_ends_the_channel(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source must not wait until a limit of minutes."""

    async def defect(*_: Any) -> int:
        raise BlockingIOError("no room in the socket")

    fills = target.fills()
    await fills.start()
    monkeypatch.setattr(filling.Filling, "_fill", defect)
    await fills.allocate(7, BLOCKS, "")
    assert isinstance(await until_failed(target), Internal)
    await fills.close()


async def test_memory_of_a_process_that_was_not_announced_is_refused(target: Target) -> None:
    fills = target.fills()
    with pytest.raises(WrongState, match="process 8"):
        await fills.allocate(8, BLOCKS, "")


async def test_closing_does_not_fail_when_the_holder_does_not_answer(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows, such as the removal of the copy, must happen."""
    fills = target.fills()
    await fills.start()

    def silent(keys: Sequence[str]) -> None:
        raise GpuFailed("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(target.holder, "drop", silent)
        await fills.close()


async def test_channel_that_cannot_fill_is_closed(target: Target) -> None:
    channels = DeviceChannels([], SimpleNamespace(), [])  # type: ignore[arg-type]
    arriving: Any = target.arriving
    channels._open[MOVE] = arriving
    with pytest.raises(SnapshotError, match="does not list GPU"):
        await channels.fill(MOVE, target.fills("GPU-00000000-0000-0000-0000-000000000000"))
    assert channels.fills(MOVE) is None
    assert channels.find(MOVE) is None
    assert target.arriving.closed


@pytest.mark.parametrize(("mark", "kept"), [(Mark.PREPARED, True), (Mark.DISCARDED, False), (Mark.ACTIVATED, False)])
def test_restarted_daemon_releases_memory_of_moves_that_have_ended(
    target: Target, tmp_path: Path, mark: Mark, kept: bool
) -> None:
    journal = Journal(tmp_path / "state", Reserve(tmp_path / "state"))
    nodes = ("node-1", "a:1", "spare-1", "b:1")
    journal.begin(Begin(MOVE, "target", "job/0", "job", 0, *nodes, "00", host.boot_id(), 0.0)).mark(mark)
    read_end, write_end = os.pipe()
    try:
        target.holder.keep(f"{MOVE}/to-7", [HeldBlock(1, 2, 0)], [read_end])
    finally:
        os.close(read_end)
        os.close(write_end)
    hold.sweep_ended(target.holder, journal)
    assert bool(target.holder.kept()) is kept


@pytest.mark.parametrize("role", ["source", "target"])
def test_restarted_daemon_has_duplicates_of_what_its_ranks_have_handed_over(
    target: Target, tmp_path: Path, role: str
) -> None:
    """What a target had is not needed: its channel has ended."""
    journal = Journal(tmp_path / "state", Reserve(tmp_path / "state"))
    nodes = ("node-1", "a:1", "spare-1", "b:1")
    journal.begin(Begin(MOVE, role, "job/0", "job", 0, *nodes, "00", host.boot_id(), 0.0)).mark(Mark.PREPARED)
    fd = os.memfd_create("memory")
    target.holder.keep(f"{MOVE}/7", [HeldBlock(1, 2, 0)], [fd])
    os.close(fd)
    target.holder.close()  # the daemon was restarted
    hold.sweep_ended(target.holder, journal)
    os.kill(target.holder.pid, 9)
    target.holder.start("test")
    assert target.holder.kept() == ({f"{MOVE}/7": 2} if role == "source" else {})
