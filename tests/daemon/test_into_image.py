"""The device memory of a snapshot on its way into the image: where the copy is, and what does not count."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.inprocess import devmem
from snapshotd.moves.device import hold, into_image, stripe_files
from snapshotd.moves.device.into_image import LEFT_FREE, IntoImage
from snapshotd.moves.device.stripe_room import StripeRoom
from snapshotd.moves.device.striped import Striped
from snapshotd.moves.jobs import stored
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.moves.rules import Mark
from snapshotd.moves.saved import Late
from snapshotd.proc import host
from snapshotd.proc.room import Room
from snapshotd.transport.image.spill import SpillingStore
from tests.daemon.offload_doubles import Source, source

__all__ = ["source"]

MOVE, GPU, SIZES = "m-00000000000a", "GPU-1", [3, 2]
MIB = 1 << 20
LOST = GpuFailed("the copier was lost")


class Held:
    """What the holder keeps of one process, and its copier. `fails`: how the copier does."""

    def __init__(self, key: str, folder: Path, names: list[str]) -> None:
        self.key, self.folder, self.names = key, folder, names
        self.copied, self.closed = 0, 0
        self.fails: Exception | None = None

    async def begin_whole(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.copied += 1
        for name, size in zip(self.names, SIZES, strict=True):
            (self.folder / name).write_bytes(b"x" * size)

    async def close(self) -> None:
        self.closed += 1


class Rank:
    """One process whose memory was handed over, and its node."""

    def __init__(self, folder: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process = next(iter(source.memories))
        room = Room(folder / "room", "a")
        self.store = SpillingStore(folder / "images", room=room)
        self.card = pb.Gpu(uuid=GPU, memory_bytes=1600 * MIB, memory_free_bytes=800 * MIB)
        self.dropped: list[str] = []
        self.given: list[bool] = []
        self.imported = [False]  # after each attempt to make the memory its own
        self.own_fails: Exception | None = None
        self.is_out = True
        holder = SimpleNamespace(drop=self.dropped.extend, kept=dict, leave=lambda _user: None)
        node = SimpleNamespace(
            config=SimpleNamespace(image_dir=folder / "images"),
            gpus=SimpleNamespace(inventory=self._inventory),
            store=self.store,
            room=room,
            holder=holder,
            caches_left={},
            gpu_copies={},
            saving={},
        )
        self.node = cast(Any, node)
        begin = Begin(
            *(MOVE, "source", "job-0", "job", 0, "a", "a:1", "a", "a:1", "00" * 32, host.boot_id(), 1.0),
            lease_s=30.0,
            coordinator="m-00000000000b",
            kind="snapshot",
        )
        self.log = Journal(folder / "state").begin(begin)
        names = stripe_files.names_of(7, len(SIZES))
        self.log.mark(Mark.FREEZING, offloaded=[OffloadedMemory(7, names, SIZES, MIB)])
        self.store.create(MOVE, MIB)
        stripes = stripe_files.make_folder(folder / "images", MOVE)
        for name in names:
            (stripes / name).write_bytes(b"\0" * 10)  # made ahead, and larger
        self.held = Held(hold.key_of(MOVE, self.process), stripes, names)
        memory: Any = SimpleNamespace(process=self.process)
        self.striped = Striped(memory, 7, names, sum(SIZES), sizes=list(SIZES))
        self.striped.hold = self.held  # type: ignore[assignment]
        self.into = IntoImage(self.node, self.log, StripeRoom(self.node, MOVE, len(names)))
        monkeypatch.setattr(devmem, "is_out", lambda _process: self.is_out)
        monkeypatch.setattr(hold, "give", self._give)
        monkeypatch.setattr(hold, "own", self._own)
        monkeypatch.setattr(hold, "imports", lambda _process: self.imported.pop(0))

    async def _inventory(self, *, fresh: bool) -> Any:
        return SimpleNamespace(gpus=[self.card])

    def _give(self, _holder: Any, _key: str, *_numbers: Any, keep: bool) -> int:
        self.given.append(keep)
        self.is_out = False
        return sum(SIZES)

    def _own(self, *_numbers: Any) -> None:
        if self.own_fails is not None:
            raise self.own_fails

    async def handed_over(self) -> None:
        await self.into.choose_place(GPU, sum(SIZES))
        self.into.begin([self.striped])
        await self.into.copied()

    async def goes_on(self) -> str:
        """The failure to save its memory, if any."""
        self.log.mark(Mark.STREAMED, continued=True)
        self.store.seal(MOVE, [])
        assert not self.whole()
        self.into.save_soon()
        return (await self.node.saving[MOVE, Late.DEVICE]).failure  # type: ignore[no-any-return]

    def whole(self) -> bool:
        return stored.is_whole(self.store, self.log)


@pytest.fixture
def rank(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> Rank:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    return Rank(folder, source, monkeypatch)


@pytest.mark.parametrize(
    ("free_mib", "caches_mib", "others_mib", "fits"),
    [(400, 0, 0, True), (399, 0, 0, False), (400, 1, 0, False), (500, 50, 50, True), (500, 50, 51, False)],
)
async def test_copy_on_the_gpu_leaves_what_the_job_may_want(
    rank: Rank, free_mib: int, caches_mib: int, others_mib: int, fits: bool
) -> None:
    rank.card.memory_free_bytes = free_mib * MIB
    rank.node.caches_left[MOVE] = caches_mib * MIB
    rank.node.gpu_copies["m-other"] = GPU, others_mib * MIB
    await rank.into.choose_place(GPU, 400 * MIB - rank.card.memory_bytes // LEFT_FREE)
    assert (MOVE in rank.node.gpu_copies) == fits


async def test_gpu_that_the_driver_does_not_list_gets_no_copy(rank: Rank) -> None:
    await rank.into.choose_place("GPU-2", 1)
    assert MOVE not in rank.node.gpu_copies


async def test_memory_is_copied_while_the_rank_runs_if_the_gpu_has_room(rank: Rank) -> None:
    await rank.handed_over()
    assert rank.held.copied == 0
    await rank.into.give_back()
    await rank.into.give_back()
    assert rank.given == [True]
    assert await rank.goes_on() == ""
    assert (rank.held.copied, rank.held.closed, rank.node.gpu_copies) == (1, 1, {})
    assert rank.whole()
    assert not stripe_files.folder_of(rank.node.config.image_dir, MOVE).exists()


async def test_memory_is_copied_while_the_rank_waits_if_the_gpu_has_no_room(rank: Rank) -> None:
    rank.card.memory_free_bytes = 0
    await rank.handed_over()
    assert rank.held.copied == 1
    await rank.into.give_back()
    assert rank.given == [], "an undo gives it back in the same way"
    assert await rank.goes_on() == ""
    assert (rank.held.copied, rank.whole()) == (1, True)


async def test_memory_that_has_grown_a_little_since_still_has_room(rank: Rank) -> None:
    await rank.into.choose_place(GPU, sum(SIZES) - 1)
    rank.into.begin([rank.striped])
    await rank.into.copied()
    assert rank.held.copied == 0
    assert rank.node.gpu_copies == {MOVE: (GPU, sum(SIZES) - 1 + rank.card.memory_bytes // LEFT_FREE // 2)}


async def test_memory_that_has_grown_much_since_is_copied_while_the_rank_waits(rank: Rank) -> None:
    rank.card.memory_bytes = 2 * LEFT_FREE
    await rank.into.choose_place(GPU, sum(SIZES) - 2)
    rank.into.begin([rank.striped])
    await rank.into.copied()
    assert (rank.held.copied, rank.node.gpu_copies) == (1, {})


async def test_copier_that_is_lost_while_the_rank_waits_fails_the_step(rank: Rank) -> None:
    rank.card.memory_free_bytes, rank.held.fails = 0, LOST
    with pytest.raises(GpuFailed):
        await rank.handed_over()


async def test_memory_that_cannot_become_the_ranks_own_is_copied_before_it_goes_on(rank: Rank) -> None:
    rank.imported = [True]
    await rank.handed_over()
    await rank.into.give_back()
    assert (rank.held.copied, rank.dropped) == (1, [rank.held.key])
    assert await rank.goes_on() == ""
    assert (rank.held.copied, rank.whole()) == (1, True)


@pytest.mark.parametrize(
    "failure",
    [LOST, OSError(errno.ENOSPC, "no space"), TimeoutError(), KeyError("done")],
    ids=lambda one: type(one).__name__,
)
async def test_rank_goes_on_whatever_keeps_its_memory_from_being_copied_at_last(rank: Rank, failure: Exception) -> None:
    """It is stopped meanwhile. Its snapshot does not count, although it could be copied later: it may have written to it."""
    rank.imported, rank.held.fails = [True], failure
    await rank.handed_over()
    await rank.into.give_back()
    assert (rank.given, rank.dropped) == ([True], [rank.held.key])
    rank.held.fails = None
    assert "went on before" in await rank.goes_on()
    assert (rank.held.copied, rank.whole()) == (0, False)


@pytest.mark.parametrize("failure", [GpuFailed("it does not answer"), OSError(errno.EMFILE, "too many files")])
async def test_rank_goes_on_if_the_holder_does_not_answer(rank: Rank, failure: Exception) -> None:
    def drop(_keys: Any) -> None:
        raise failure

    rank.node.holder.drop, rank.imported = drop, [True]
    await rank.handed_over()
    await rank.into.give_back()
    assert rank.held.copied == 1


async def test_memory_that_the_rank_may_have_written_to_does_not_count(rank: Rank) -> None:
    """A call into CUDA did not return, so its threads were released with the memory that is shared with the copy."""
    rank.own_fails = Timeout("not yet")
    await rank.handed_over()
    with pytest.raises(Timeout):
        await rank.into.give_back()
    rank.own_fails = None
    await rank.into.give_back()
    assert "went on before" in await rank.goes_on()
    assert not rank.whole()


async def test_copier_that_is_lost_while_the_rank_runs_leaves_no_whole_image(rank: Rank) -> None:
    await rank.handed_over()
    await rank.into.give_back()
    rank.held.fails = LOST
    assert "the copier was lost" in await rank.goes_on()
    assert (rank.held.closed, rank.node.gpu_copies, rank.whole()) == (1, {}, False)


async def test_saving_is_stopped_with_the_snapshot(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    await rank.handed_over()
    await rank.into.give_back()
    begun, never = asyncio.Event(), asyncio.Event()

    async def reach(_point: Any) -> None:
        begun.set()
        await never.wait()

    monkeypatch.setattr(into_image, "reach", reach)
    rank.into.save_soon()
    await begun.wait()
    await rank.into.close()
    assert rank.node.saving == {}
    assert not rank.whole()
