"""Twins of a rank that is snapshotted: what is taken from them is what the rank had, and whatever fails, none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api.errors import Full, GpuFailed, Timeout, Undone, WrongState
from snapshotd.criu import page_ranges
from snapshotd.inprocess import shimctl
from snapshotd.moves.jobs import stored
from snapshotd.moves.jobs.images import StoredImages
from snapshotd.moves.rules import Mark
from snapshotd.moves.saved import Late
from snapshotd.moves.source import twin_memory, twins
from snapshotd.moves.source.large_memory import LEAST_BYTES
from snapshotd.moves.source.twin_memory import LEAST_RUN_BYTES, TwinMemory
from snapshotd.moves.source.twins import NAME
from snapshotd.proc import cgroup, comm, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES, Free
from snapshotd.proc.tree import Process
from tests.kernel import needs_page_scans
from tests.moves.twinned import MOVE, PATIENCE_S, SIZE_BYTES, Rank, until, within

pytestmark = [pytest.mark.root, needs_page_scans]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(twin_memory, "memory_room", lambda _pid: [("this node", 1 << 50)])  # whatever else runs here
    made = Rank(tmp_path)
    yield made
    made.end()


def mostly(found: list[page_ranges.Range], expected: list[page_ranges.Range]) -> None:
    """Nothing else was found, and most of it was: the kernel may move pages, because the rank is not frozen here."""
    assert page_ranges.common(found, expected) == found
    assert page_ranges.size_bytes(found) > page_ranges.size_bytes(expected) // 2


async def test_what_the_rank_has_not_written_is_copied_while_it_writes(rank: Rank) -> None:
    rank.memory[LEAST_BYTES : LEAST_BYTES + 1] = b"x"  # after the twin was made, before the freeze
    made = rank.twins()
    (layer,) = made.find()
    mostly(within(rank, layer.pages), [(0, LEAST_BYTES), (LEAST_BYTES + PAGE_BYTES, SIZE_BYTES)])
    assert (layer.pid, layer.parent, layer.rounds) == (os.getpid(), None, [layer.pages])
    assert made.find() == [layer]
    made.reserve()
    rank.sealed()
    assert rank.node.store.reserved_bytes() == made.bytes, "beyond the seal"
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
    at = page_ranges.size_bytes(page_ranges.common(layer.pages, [(0, rank.start)]))  # a run may begin before it
    for start, end in within(rank, layer.pages):
        assert found[at : at + end - start] == rank.content[start:end]
        at += end - start
    assert rank.room.free().reserved_bytes == 0
    assert rank.node.store.reserved_bytes() == 0
    (part,) = await StoredImages(rank.node, cast(Any, None))._saved(MOVE)
    assert (part.name, part.bytes) == ("save-host", size)


def test_scattered_writes_leave_long_runs_to_the_twin(rank: Rank) -> None:
    step = LEAST_RUN_BYTES // 2
    for at in range(0, SIZE_BYTES // 4, step):
        rank.memory[at : at + 1] = b"x"
    (layer,) = rank.twins().find()
    mostly(within(rank, layer.pages), [(SIZE_BYTES // 4 - step + PAGE_BYTES, SIZE_BYTES)])


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


@pytest.mark.parametrize("danger", ["memory.max", "memory.oom.group", ""])
def test_rank_that_would_be_killed_instead_of_its_twin_needs_more_room(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, danger: str
) -> None:
    """Files as the kernel has them: this test may run where no memory controller is."""
    above = tmp_path / "cgroup"
    own = above / "job" / "rank"
    own.mkdir(parents=True)
    (own / "memory.max").write_text(f"{1 << 40}\n" if danger == "memory.max" else "max\n")
    (above / "job" / "memory.oom.group").write_text("1\n" if danger == "memory.oom.group" else "0\n")
    monkeypatch.setattr(twins, "mount_point", lambda: above)
    size_bytes = 8 << 30
    assert twins.floor_bytes(own, size_bytes) == (2 << 30 if danger else FLOOR_BYTES)
    assert twins.floor_bytes(own, 1 << 20) == FLOOR_BYTES
    rank.log.mark(Mark.BEGUN, cgroup=str(own))
    free = Free(1 << 50, "this node", 0)
    monkeypatch.setattr(rank.room, "free", lambda **_: free)
    for room_bytes, enough in ((size_bytes + RESERVE_BYTES, not danger), (2 * size_bytes, True)):
        monkeypatch.setattr(twins, "memory_room", lambda _pid, left=room_bytes: [("cgroup job", left)])
        if enough:
            twins._reserve(rank.node, rank.log, size_bytes)
        else:
            with pytest.raises(Full, match="cgroup job leaves"):
                twins._reserve(rank.node, rank.log, size_bytes)


class Made:
    """The mailbox of a process that makes a process with this number."""

    def __init__(self, pid: int) -> None:
        self.pid, self.asked = pid, 0

    def serves(self) -> bool:
        return True

    def twin(self, _timeout_s: float, _life_s: float) -> int:
        self.asked += 1
        return self.pid


def test_rank_that_adopts_orphans_is_asked_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the twin is a child of the rank."""
    mailbox = Made(tree.inner_pid(rank.twin.pid))
    monkeypatch.setattr(shimctl, "find", lambda _process: mailbox)
    monkeypatch.setattr(twins, "memory_room", lambda _pid: [("this node", 1 << 50)])
    monkeypatch.setattr(rank.room, "free", lambda **_: Free(1 << 50, "this node", 0))
    group = cast(Any, SimpleNamespace(pids=lambda: [os.getpid(), rank.twin.pid]))
    for _ in range(2):
        assert twins.make(rank.node, rank.log, group) == []
        assert mailbox.asked == 1
    rank.node.adopters.clear()
    rank.node.adopters.add(Process(os.getpid(), 1))  # another one, which had this pid before
    twins.make(rank.node, rank.log, group)
    assert mailbox.asked == 2


def test_process_that_got_the_pid_of_a_twin_is_not_put_aside(groups: Cgroup) -> None:
    own = Cgroup(groups.path.parent / "twins").create()
    other = sleeper(groups, "python")
    try:
        with pytest.raises(ProcessLookupError):
            twins._put_aside(Process(other.pid, 1), own)
        assert own.pids() == []
        assert cgroup.of_process(other.pid) == cgroup.of_process(os.getpid()), "where its parent is"
        twins._put_aside(Process.of(other.pid), own)
        assert own.pids() == [other.pid]
        assert Path(f"/proc/{other.pid}/oom_score_adj").read_text() == "1000\n"
    finally:
        other.kill()
        other.wait(PATIENCE_S)


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
