"""Device memory that processes of a rank share: when it is closed and opened, and what refuses a move."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, RankGone, Where
from snapshotd.inprocess import sharing as inprocess
from snapshotd.inprocess.devmem import Caught
from snapshotd.inprocess.sharing import OwnerGone
from snapshotd.moves.device import sharing, standstill
from snapshotd.moves.device.memory import Lost
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.nccl import held_copy
from snapshotd.moves.peers import connections, socket_options
from snapshotd.moves.target import waking
from snapshotd.preflight import shared_memory
from snapshotd.proc import tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process


class One:
    """What a process shares. `failures`: of its next attempts."""

    def __init__(self, rank: Rank, process: Process, **state: Any) -> None:
        self.rank, self.process = rank, process
        self.failures: list[Exception | None] = []
        self.found: dict[str, Any] = {
            **dict.fromkeys(("exports", "imports", "moving_exports", "moving_imports", "server"), 0),
            **dict.fromkeys(("shared_closed", "imports_closed", "shared_outside", "device_offloaded"), False),
            "opened_from": (),
            "parked": True,
            **state,
        }

    def state(self) -> Any:
        return SimpleNamespace(**self.found)

    def _do(self, act: str) -> None:
        self.rank.said.append(f"{act} {self.process.pid}")

    def attempt(self) -> None:
        self._do("try")
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    def close(self) -> None:
        self._do("close")
        self.found |= {"shared_closed": True, "imports_closed": True}

    def offer(self) -> None:
        self._do("offer")

    def open(self) -> None:
        self._do("open")
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        self.found |= {"shared_closed": False, "imports_closed": False}


class Rank:
    """An owner, its guest and a process that shares nothing. Records what is asked of them."""

    def __init__(self, processes: Sequence[Process], monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes = list(processes)
        self.said: list[str] = []
        self.owner = One(self, processes[0], exports=1, moving_exports=1, server=5)
        self.guest = One(self, processes[1], imports=1, moving_imports=1, opened_from=(5,))
        self.other = One(self, processes[2])
        self.released: list[list[Process]] = []
        self.locked: list[Process] = []
        self.stopped = 0
        monkeypatch.setattr(inprocess, "find", self.find)
        monkeypatch.setattr(standstill, "let_go", self._let_go)
        monkeypatch.setattr(standstill, "still", self._still)
        monkeypatch.setattr(shared_memory, "LOOK_AGAIN_S", 0.0)

    @property
    def all(self) -> list[One]:
        return [self.owner, self.guest, self.other]

    def find(self, process: Process) -> Any:
        return next(one for one in self.all if one.process == process)

    async def _let_go(self, processes: Sequence[Process]) -> None:
        assert not any(one.found["shared_closed"] for one in self.all)
        self.released.append(list(processes))

    async def _still(self, gpus: Any, processes: Any, parking: Any, parts: Parts) -> None:
        assert list(processes) == list(parking) == self.released[-1]
        self.locked += processes

    async def lock(self, process: Process, timeout_s: float) -> None:
        self.locked.append(process)

    async def unlock(self, process: Process, timeout_s: float) -> None:
        self.locked.remove(process)

    async def _stop_others(self) -> None:
        self.stopped += 1

    async def close(self, *, known: bool = True, others: Sequence[Any] = ()) -> None:
        self.locked = list(self.processes)
        gpus: Any = self
        await sharing.close(gpus, self.processes, others, Parts(), self._stop_others, known=known)

    def pids(self, act: str) -> list[int]:
        return [int(line.split()[1]) for line in self.said if line.split()[0] == act]


@pytest.fixture
def three() -> Iterator[list[Process]]:
    running = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield [Process.of(each.pid) for each in running]
    for each in running:
        each.kill()
        each.wait()


@pytest.fixture
def rank(three: list[Process], monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(three, monkeypatch)


async def test_all_are_tried_before_the_first_is_closed(rank: Rank) -> None:
    await rank.close()
    owner, guest = rank.owner.process.pid, rank.guest.process.pid
    assert rank.said[:2] == [f"try {owner}", f"try {guest}"]
    assert sorted(rank.said[2:]) == sorted([f"close {owner}", f"close {guest}"])
    assert sorted(rank.locked) == sorted(rank.processes)
    assert rank.released == []


async def test_all_that_share_are_released_and_tried_again_together(rank: Rank) -> None:
    """What one frees while it is released for a moment, another one may have open, which has tried before."""
    rank.guest.failures = [Caught("in cuMemMap")]
    await rank.close()
    assert rank.released == [[rank.owner.process, rank.guest.process]]
    assert rank.pids("try") == [rank.owner.process.pid, rank.guest.process.pid] * 2
    assert rank.stopped == 1


async def test_owner_that_frees_what_is_open_while_it_is_released_is_noticed(rank: Rank) -> None:
    rank.owner.failures = [Caught("in cudaFree")]
    rank.guest.failures = [None, OwnerGone("no process offers memory that is open here")]
    with pytest.raises(GpuFailed, match="gpu-ipc: no process offers memory"):
        await rank.close()
    assert rank.pids("close") == []


async def test_threads_that_are_caught_again_and_again_refuse_the_move(rank: Rank) -> None:
    rank.guest.failures = [Caught("in cuMemMap")] * sharing.TRIES
    with pytest.raises(GpuFailed, match=f"{sharing.TRIES} times in a row threads of process {rank.guest.process.pid}"):
        await rank.close()
    assert rank.pids("close") == []


async def test_what_is_shared_since_preflight_refuses_the_move(rank: Rank) -> None:
    """Whether this node and the target can move it was not asked."""
    await sharing.attempt(rank.processes, known=False)
    with pytest.raises(GpuFailed, match=r"has begun to share .* since preflight: .*1 handles exported, 0 opened"):
        await rank.close(known=False)
    assert rank.said == []


@pytest.mark.parametrize("closed", [False, True])
async def test_memory_that_is_open_does_not_come_to_the_drivers_checkpoint(rank: Rank, closed: bool) -> None:
    rank.owner.found["device_offloaded"] = True
    rank.guest.found |= {"imports_closed": closed, "shared_closed": closed}
    if closed:
        await sharing.must_be_out(rank.processes)
        return
    with pytest.raises(GpuFailed, match="has device memory of other processes open"):
        await sharing.must_be_out(rank.processes)


async def test_exported_memory_does_not_come_to_the_drivers_checkpoint(rank: Rank) -> None:
    rank.guest.found |= {"imports_closed": True, "shared_closed": True}
    with pytest.raises(GpuFailed, match=f"process {rank.owner.process.pid} shares .* could not be offloaded"):
        await sharing.must_be_out(rank.processes)


async def test_memory_that_cannot_be_offloaded_refuses_the_move_before_the_pause(rank: Rank) -> None:
    await sharing.must_leave_in_stripes(rank.processes, [rank.owner.process], "")
    with pytest.raises(GpuFailed, match="which cannot be offloaded: there is no room") as caught:
        await sharing.must_leave_in_stripes(rank.processes, [rank.other.process], "there is no room")
    assert caught.value.where is Where.SOURCE_RUNNING


async def test_processes_are_released_only_if_none_of_the_rank_shares_memory(rank: Rank) -> None:
    with pytest.raises(GpuFailed, match="in the middle of a call into CUDA"):
        await sharing.must_stay_parked(rank.processes)
    await sharing.must_stay_parked([rank.other.process])


async def test_process_that_cannot_close_memory_refuses_the_move_before_the_pause(rank: Rank) -> None:
    rank.guest.failures = [GpuFailed("cuStreamCreate answers 719")]
    with pytest.raises(GpuFailed, match="gpu-ipc: cuStreamCreate answers 719") as caught:
        await sharing.attempt(rank.processes, known=True)
    assert caught.value.where is Where.SOURCE_RUNNING
    rank.owner.found["shared_outside"] = True
    with pytest.raises(GpuFailed, match="processes that are not in the rank have opened"):
        await sharing.attempt(rank.processes, known=True)


@pytest.mark.parametrize("ends", [True, False])
async def test_only_processes_that_have_ended_are_passed_over(rank: Rank, ends: bool) -> None:
    """One that is there and cannot be asked may have memory open."""
    rank.guest.failures = [RankGone("it does not answer")]
    if ends:
        end(rank.guest.process)
        await rank.close()
        assert rank.pids("close") == [rank.owner.process.pid]
        return
    with pytest.raises(RankGone):
        await rank.close()
    assert rank.pids("close") == []


def end(process: Process) -> None:
    process.signal(9)
    while process.alive():
        pass


def closed(rank: Rank) -> None:
    for one in (rank.owner, rank.guest):
        one.close()
    rank.said.clear()


def test_process_that_ended_while_its_memory_was_closed_is_not_waited_for(rank: Rank) -> None:
    closed(rank)
    end(rank.guest.process)
    sharing.reopen(rank.processes)
    assert rank.said == [f"offer {rank.owner.process.pid}", f"open {rank.owner.process.pid}"]


@pytest.mark.parametrize("ended", [True, False])
def test_memory_is_lost_only_if_its_owner_has_ended(rank: Rank, *, ended: bool) -> None:
    """An owner that is there may offer it at the next attempt."""
    closed(rank)
    rank.guest.failures = [OwnerGone("no process offers memory that was open here")]
    if ended:
        end(rank.owner.process)
    with pytest.raises(Lost if ended else OwnerGone):
        sharing.reopen(rank.processes)
    if not ended:
        sharing.reopen(rank.processes)
        assert not rank.guest.found["shared_closed"]


async def test_memory_that_another_rank_of_this_node_has_open_refuses_the_move(rank: Rank) -> None:
    there = SimpleNamespace(rank=7, group=SimpleNamespace(pids=lambda: [rank.other.process.pid]))
    rank.other.found["opened_from"] = (5,)
    rank.processes.pop()
    with pytest.raises(GpuFailed, match=f"process {rank.other.process.pid} of rank 7 has opened"):
        await rank.close(others=[there])


# ---------------------------------------------------------------- after COMMIT


@pytest.fixture
def woken(rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A copy of the rank that was activated."""
    for module, name in ((connections, "let_go"), (tree, "continue_all"), (held_copy, "processes")):
        monkeypatch.setattr(module, name, lambda *arguments: [])
    monkeypatch.setattr(socket_options, "put_back", lambda *arguments: [])
    for name in ("thaw", "kill"):
        monkeypatch.setattr(Cgroup, name, lambda group, limit_s, name=name: rank.said.append(name))
    known = SimpleNamespace(
        cgroup=str(tmp_path),
        socket_options=SimpleNamespace(timers=[]),
        stopped_before=[],
        cuda=rank.processes,
        nccl_processes=[],
        gates_opened=False,
    )
    return SimpleNamespace(whole=lambda: known, begin=SimpleNamespace(rank=0))


async def test_copy_is_woken_when_what_it_shares_is_open(rank: Rank, woken: Any) -> None:
    rank.guest.close()
    rank.said.clear()
    await waking.wake(woken)
    assert rank.said == ["thaw", f"offer {rank.guest.process.pid}", f"open {rank.guest.process.pid}"]
    assert rank.released == [rank.processes]


async def test_copy_that_cannot_have_back_what_it_shared_is_ended(rank: Rank, woken: Any) -> None:
    rank.guest.close()
    rank.guest.failures = [OwnerGone("no process offers memory that was open here")]
    rank.owner.found["server"] = 6
    await waking.wake(woken)
    assert rank.said[-1] == "kill"
    assert rank.released == []


async def test_copy_that_shares_nothing_is_woken_as_before(rank: Rank, woken: Any) -> None:
    for one in rank.all:
        one.found |= {"exports": 0, "imports": 0}
    await waking.wake(woken)
    assert rank.said == ["thaw"]
    assert rank.released == [rank.processes]
