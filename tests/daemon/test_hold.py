"""Device memory that the holder takes over, as the source sees it: nothing is left running, and lost memory is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Full, GpuFailed, Timeout, Unreachable, Where
from snapshotd.inprocess import devmem, holding
from snapshotd.inprocess.holding import CannotExport
from snapshotd.moves.device import hold, offload, refill
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.record_parts import StripedProcess
from snapshotd.proc.tree import Process
from snapshotd.transport.device import ring
from tests.daemon.offload_doubles import MOVE, SIZE, Source, source

__all__ = ["source"]


class Held:
    """What prepares and copies the memory of one process. `fails`: processes that cannot be prepared."""

    made: list[Held]
    fails: set[int]

    def __init__(self, node: Any, move: str, process: Process, *arguments: Any, whole: bool) -> None:
        self.process, self.key = process, hold.key_of(move, process)
        self.said: list[str] = []
        self.made.append(self)

    async def prepare(self, *, sends: bool) -> None:
        if self.process.pid in self.fails:
            raise GpuFailed("the GPU is not there")
        await asyncio.sleep(0.05)
        self.said.append("prepared")

    async def close(self) -> None:
        self.said.append("closed")

    def hand_over(self, timeout_s: float) -> int:
        self.said.append("handed over")
        return SIZE

    @property
    def sizes(self) -> list[int]:
        return [SIZE]

    async def pass_on(self, channel: Any, pid: int) -> list[asyncio.Task[None]]:
        async def copy() -> None:
            self.said.append("copied")

        return [asyncio.create_task(copy())]


@pytest.fixture
def holding_source(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    source.node.config.hold_device_memory = True
    monkeypatch.setattr(Held, "made", [], raising=False)
    monkeypatch.setattr(Held, "fails", set(), raising=False)
    monkeypatch.setattr(offload, "Hold", Held)
    yield source
    source.node.holder.close()  # it was started


async def prepared(source: Source) -> offload.Offload:
    made = await offload.prepare(source.node, source.log, list(source.memories), 0, ["GPU-1"])
    assert made is not None
    return made


async def test_failed_preparation_leaves_no_other_one_running(holding_source: Source) -> None:
    """The first to fail must not leave the others behind: each has a process that has attached to the GPU."""
    first, _ = holding_source.memories
    Held.fails = {first.pid}
    parking = await prepared(holding_source)
    assert [one.said for one in Held.made] == [["closed"], ["prepared", "closed"]]
    assert "goes through files on this node: the GPU is not there" in parking.warnings[0]
    await parking.close()


async def test_memory_that_cannot_be_exported_goes_through_files_without_a_warning(
    holding_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(held: Held, *, sends: bool) -> None:
        raise CannotExport("the program has created memory that cannot be exported")

    monkeypatch.setattr(Held, "prepare", prepare)
    parking = await prepared(holding_source)
    assert (parking.warnings, parking.holds, len(parking.striped)) == ([], False, 2)
    assert [one.said for one in Held.made] == [["closed"], ["closed"]]
    await parking.close()


async def test_missing_channel_is_reported_once(holding_source: Source) -> None:
    """It is asked for twice: for held memory, and for files."""
    holding_source.refusal = Unreachable("b does not answer")
    parking = await prepared(holding_source)
    assert not parking.holds
    (warning,) = parking.warnings
    assert "for lack of a device-memory channel: b does not answer" in warning
    await parking.close()


async def test_rings_are_allocated_before_the_freeze_and_count_once(holding_source: Source) -> None:
    parking = await prepared(holding_source)
    assert parking.holds
    assert len(parking.names) > 1
    for name in parking.names:
        assert (parking.folder / name).stat().st_blocks * 512 >= ring.RING_BYTES
    assert holding_source.node.room.free().reserved_bytes == 0
    await parking.close()


async def test_memory_that_would_be_handed_over_is_left_to_the_driver(holding_source: Source) -> None:
    """A thread of the process was parked inside an allocation each time. It has no files, as nothing is to be sent."""
    parking = await prepared(holding_source)
    for name in parking.names:
        (parking.folder / name).unlink()
    parking.channel.takes_over = True
    left, other = parking.striped
    await parking._leave_to_driver(left, "its thread is in an allocation")
    assert parking.striped == [other]
    assert "the driver's checkpoint carries" in parking.warnings[-1]
    await parking.close()


async def test_process_that_ended_leaves_no_copier(holding_source: Source) -> None:
    first, _ = holding_source.memories
    parking = await prepared(holding_source)
    assert parking.holds
    await parking.out(holding_source.driver, [first], Parts(), holding_source._stop_others)
    assert [one.said for one in Held.made] == [["prepared", "handed over", "copied"], ["prepared", "closed"]]
    await parking.close()


async def test_move_is_refused_if_the_target_has_room_for_rings_only(holding_source: Source) -> None:
    """The driver's checkpoint would put all of it into the image, for which the target has no memory either."""
    Held.fails = {next(iter(holding_source.memories)).pid}
    opened = []

    def full(held: bool) -> None:
        opened.append(held)
        if not held:
            raise Full("64 MiB more are needed, 1 MiB are free")

    holding_source.opening = full
    parking = await prepared(holding_source)
    assert opened == [True, False]
    with pytest.raises(Full, match=r"the GPU is not there.* the target has no room for it: 64 MiB more"):
        parking.must_fit(1, Where.SOURCE_RUNNING)
    await parking.close()


# ---------------------------------------------------------------- undo


class InProcess:
    def __init__(self, size: int) -> None:
        self.size, self.said = size, list[str]()

    def ready(self, stripes: int, slot_bytes: int) -> int:
        return self.size

    def has_imported(self) -> bool:
        return True

    def own(self, timeout_s: float) -> None:
        raise Timeout("a call into CUDA did not return in time")

    def close(self) -> None:
        self.said.append("closed")

    def take_back(self, timeout_s: float, held: Any, count: int) -> int:
        self.said.append(f"took back {count}")
        return self.size


def striped(source: Source) -> StripedProcess:
    process = next(iter(source.memories))
    return StripedProcess(process.pid, process.start_ticks, ["device-1-0"], 1 << 20, held=True)


def test_memory_that_is_not_all_kept_is_lost(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = striped(source), InProcess(10)
    monkeypatch.setattr(holding, "find", lambda process: found)
    kept, dropped = {hold.key_of(MOVE, one.process): 4}, list[str]()
    holder: Any = SimpleNamespace(
        kept=lambda: kept, held=lambda key: iter(()), count=lambda key: 3, drop=dropped.extend
    )
    with pytest.raises(Lost, match="4 bytes are kept, 10 were handed over"):
        hold.take_back(holder, MOVE, one, 1.0)
    assert (found.said, dropped) == (["closed"], [])
    kept[hold.key_of(MOVE, one.process)] = 10
    assert hold.take_back(holder, MOVE, one, 1.0) == 10
    assert (found.said[-1], dropped) == ("took back 3", list(kept))
    kept.clear()
    with pytest.raises(Lost, match="has ended"):
        hold.take_back(holder, MOVE, one, 1.0)


def test_replacement_that_hangs_is_not_only_logged(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's threads must not be released as if nothing were under way."""
    monkeypatch.setattr(holding, "find", lambda process: InProcess(10))
    with pytest.raises(Timeout, match="did not return"):
        hold.own(next(iter(source.memories)), 1, 1 << 20, 1.0)


@pytest.mark.parametrize("outside", [False, True])
async def test_memory_that_another_rank_has_got_is_not_replaced(
    source: Source, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    """After an undo with nothing offloaded: there would be two memories."""
    one, replaced = striped(source), list[Process]()
    source.log.mark(source.log.last_mark, striped_processes=[one])
    source.sharing.add(one.process)
    source.outside |= {one.process} if outside else set()
    monkeypatch.setattr(devmem, "is_out", lambda process: False)
    monkeypatch.setattr(hold, "imports", lambda process: True)
    monkeypatch.setattr(hold, "own", lambda process, *numbers: replaced.append(process))
    holder: Any = SimpleNamespace(drop=lambda keys: None)
    await refill.on_source(source.node.config.image_dir, source.log, holder)
    assert replaced == ([] if outside else [one.process])
