"""Twins of a rank that is snapshotted: what is taken from them is what the rank had, and whatever fails, none is left."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api.errors import GpuFailed, Timeout, Undone, WrongState
from snapshotd.criu import page_ranges
from snapshotd.inprocess import shimctl
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.saved import Late
from snapshotd.moves.source import twin_memory, twins
from snapshotd.moves.source.large_memory import LEAST_BYTES
from snapshotd.moves.source.twin_memory import LEAST_RUN_BYTES, TwinMemory
from snapshotd.moves.source.twins import NAME, Twin
from snapshotd.proc import cgroup, comm
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process
from snapshotd.transport.image.store import ImageStore
from tests.kernel import needs_page_scans

pytestmark = [pytest.mark.root, needs_page_scans]

MOVE = "m-000000000001"
SIZE_BYTES = 2 * LEAST_BYTES
PATIENCE_S = 60.0


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


class Rank:
    """This process, with large memory; a child that only waits is its twin."""

    def __init__(self, folder: Path) -> None:
        self.memory = mmap.mmap(-1, SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.content = bytearray(os.urandom(SIZE_BYTES))
        self.content[3 * PAGE_BYTES : 90 * PAGE_BYTES] = bytes(87 * PAGE_BYTES)
        self.memory[:] = bytes(self.content)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        store, journal = ImageStore(folder / "images", on_disk=True), Journal(folder / "state")
        store.create(MOVE, 1 << 30)
        self.room = Room(folder / "room", "a")
        node = SimpleNamespace(
            config=SimpleNamespace(node="a", snapshot_copy_on_write=True),
            store=store,
            store_of=lambda _begin: store,
            journal=journal,
            room=self.room,
            saving={},
        )
        self.node = cast(Any, node)
        where = ("train-0-01234567", "train", 0, "a", "a:1", "a", "a:1")
        self.log = journal.begin(
            Begin(MOVE, "source", *where, "00" * 32, "boot", 1.0, coordinator="m-c", kind="snapshot")
        )
        self.log.mark(Mark.BEGUN, pid=os.getpid(), start_ticks=1, cgroup=str(folder / "no-cgroup" / "rank"))
        self.twin = self._fork()

    def _fork(self) -> Process:
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(0)
        return Process.of(pid)

    def twins(self) -> TwinMemory:
        return TwinMemory(self.node, self.log, [Twin(os.getpid(), os.getpid(), self.twin)])

    def sealed(self) -> None:
        """Nothing but what its twin has is missing."""
        assert self.node.store.seal(MOVE, []) == []

    def end(self) -> None:
        self.twin.signal(signal.SIGKILL)
        os.waitpid(self.twin.pid, 0)
        self.room.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.end()


def within(rank: Rank, pages: page_ranges.Ranges) -> list[page_ranges.Range]:
    found = page_ranges.common(pages, [(rank.start, rank.start + SIZE_BYTES)])
    return [(start - rank.start, end - rank.start) for start, end in found]


async def test_what_the_rank_has_not_written_is_copied_while_it_writes(rank: Rank) -> None:
    rank.memory[LEAST_BYTES : LEAST_BYTES + 1] = b"x"  # after the twin was made, before the freeze
    made = rank.twins()
    (layer,) = made.find()
    assert within(rank, layer.pages) == [(0, LEAST_BYTES), (LEAST_BYTES + PAGE_BYTES, SIZE_BYTES)]
    assert (layer.pid, layer.parent, layer.rounds) == (os.getpid(), None, [layer.pages])
    assert made.find() == [layer]
    made.reserve()
    rank.sealed()
    rank.log.mark(Mark.STREAMED, late=made.files(), continued=True)
    rank.memory[:] = b"y" * SIZE_BYTES  # the rank goes on
    assert not stored.is_whole(rank.node.store, rank.log)
    made.save_soon()
    saved = await rank.node.saving[MOVE, Late.HOST]
    assert (saved.failure, saved.bytes) == ("", made.bytes)
    assert stored.is_whole(rank.node.store, rank.log)
    ((name, size),) = made.files()
    file = rank.node.store.path(MOVE) / name
    found = file.read_bytes()
    assert len(found) == size == made.bytes
    assert file.stat().st_blocks * 512 < size, "zero pages are holes"
    at = page_ranges.size_bytes([one for one in layer.pages if one[1] <= rank.start])
    for start, end in within(rank, layer.pages):
        assert found[at : at + end - start] == rank.content[start:end]
        at += end - start
    assert rank.room.free().reserved_bytes == 0
    (part,) = await StoredImages(rank.node, cast(Any, None))._saved(MOVE)
    assert (part.name, part.bytes) == ("save-host", size)


def test_scattered_writes_leave_long_runs_to_the_twin(rank: Rank) -> None:
    step = LEAST_RUN_BYTES // 2
    for at in range(0, SIZE_BYTES // 4, step):
        rank.memory[at : at + 1] = b"x"
    (layer,) = rank.twins().find()
    assert within(rank, layer.pages) == [(SIZE_BYTES // 4 - step + PAGE_BYTES, SIZE_BYTES)]


def test_process_whose_pages_lie_elsewhere_is_left_to_criu(rank: Rank) -> None:
    made = rank.twins()
    assert made.find({os.getpid()}) == []
    assert (made.bytes, made.files()) == (0, [])


def test_twin_that_has_ended_before_the_dump_is_not_used(rank: Rank) -> None:
    rank.twin.signal(signal.SIGKILL)
    until(lambda: not rank.twin.alive())
    assert rank.twins().find() == []


async def test_snapshot_does_not_count_if_the_twin_ends_while_it_is_copied(rank: Rank) -> None:
    made = rank.twins()
    made.find()
    rank.sealed()
    rank.log.mark(Mark.STREAMED, late=made.files(), continued=True)
    rank.twin.signal(signal.SIGKILL)
    until(lambda: not rank.twin.alive())
    made.save_soon()
    with pytest.raises(Undone, match=r"is not in the image: the twin of process .* has ended"):
        await StoredImages(rank.node, cast(Any, None))._saved(MOVE)
    assert not stored.is_whole(rank.node.store, rank.log)


async def test_snapshot_that_is_given_up_is_not_copied(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = asyncio.Event()

    async def reach(_point: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(twin_memory, "reach", reach)
    made = rank.twins()
    made.find()
    made.reserve()
    rank.sealed()
    made.save_soon()
    await reached.wait()
    sending = asyncio.create_task(StoredImages(rank.node, cast(Any, None))._saved(MOVE))
    await asyncio.sleep(0)
    await made.close()
    with pytest.raises(WrongState, match="given up"):
        await sending
    assert rank.room.free().reserved_bytes == 0
    assert rank.node.saving == {}
    await made.close()


async def test_copy_ends_before_the_rank_runs_out_of_memory(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        rank.twin.signal(signal.SIGKILL)
        until(lambda: not rank.twin.alive())

    async def copy(_self: TwinMemory, _one: object) -> None:
        while rank.twin.alive():  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.005)
        raise Undone("the twin has ended")

    monkeypatch.setattr(twin_memory, "memory_room", lambda _pid: [("cgroup job", 1 << 20)])
    monkeypatch.setattr(twins, "end", end)
    monkeypatch.setattr(TwinMemory, "_copy", copy)
    made = rank.twins()
    made.find()
    rank.sealed()
    made.save_soon()
    saved = await rank.node.saving[MOVE, Late.HOST]
    assert "memory has run out while it was copied: cgroup job leaves the rank 1 MiB" in saved.failure


async def test_rank_goes_on_although_its_twin_cannot_be_killed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(_move_log: object) -> None:
        raise Timeout("cgroup twins is still populated after 20 s")

    monkeypatch.setattr(twins, "sweep", stuck)
    made = rank.twins()
    made.find()
    made.reserve()
    await made.close()
    assert rank.room.free().reserved_bytes == 0


class Large:
    """The mailbox of a process that is worth a twin."""

    def __init__(self, answer: Exception) -> None:
        self.answer, self.asked = answer, 0

    def serves(self) -> bool:
        return True

    def twin(self, _timeout_s: float, _life_s: float) -> int:
        self.asked += 1
        raise self.answer


@pytest.mark.parametrize("room_bytes", [1 << 50, 1 << 20])
def test_process_of_which_no_twin_can_be_made_is_left_to_criu(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    mailbox = Large(GpuFailed("no copy of it can be made: Resource temporarily unavailable"))
    monkeypatch.setattr(shimctl, "find", lambda _process: mailbox)
    monkeypatch.setattr(twins, "memory_room", lambda _pid: [("this node", room_bytes)])
    group = cast(Any, SimpleNamespace(pids=lambda: [os.getpid()]))
    assert twins.make(rank.node, rank.log, group) == []
    assert mailbox.asked == (room_bytes > 1 << 30), "without room for all that it writes it is not even asked"
    assert rank.room.free().reserved_bytes == 0
    rank.node.config.snapshot_copy_on_write = False
    assert twins.make(rank.node, rank.log, group) == []


def test_children_of_a_large_process_have_no_twins(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share its memory since the fork: each page is dumped once."""
    monkeypatch.setattr(shimctl, "find", lambda _process: Large(GpuFailed("")))
    found = twins._candidates([os.getpid(), rank.twin.pid])
    assert [process.pid for process, _, _ in found] == [os.getpid()]
    assert [process.pid for process, _, _ in twins._candidates([rank.twin.pid])] == [rank.twin.pid]


@pytest.fixture
def groups() -> Iterator[Cgroup]:
    above = Cgroup(cgroup.of_process(os.getpid()) / f"twins-{os.getpid()}")
    yield Cgroup(above.path / "rank").create()
    for path in above.path.iterdir():
        if path.is_dir():
            Cgroup(path).kill(PATIENCE_S)
    above.remove()


def sleeper(group: Cgroup, name: str) -> subprocess.Popen[bytes]:
    """A process without a descriptor."""
    text = f"import ctypes, os, signal; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); os.closerange(0, 99); signal.pause()"
    made = subprocess.Popen([sys.executable, "-c", text])
    group.add(made.pid)
    until(lambda: comm.read(made.pid) == name and not os.listdir(f"/proc/{made.pid}/fd"))
    return made


def test_sweep_ends_all_twins_and_no_process_of_the_rank(rank: Rank, groups: Cgroup) -> None:
    """Also one whose daemon died before it was in a cgroup of its own."""
    rank.log.mark(Mark.BEGUN, cgroup=str(groups.path))
    own = twins.group_of(rank.log).create()
    stray, known, innocent = sleeper(groups, NAME), sleeper(own, NAME), sleeper(groups, "python")
    try:
        twins.end_left(rank.log)
        assert (stray.wait(PATIENCE_S), known.wait(PATIENCE_S)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert innocent.poll() is None
        assert not own.exists()
        twins.end_left(rank.log)
    finally:
        innocent.kill()
        innocent.wait(PATIENCE_S)
