"""The order in which a rank's threads are parked and its driver is locked, and what happens when either times out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout
from snapshotd.inprocess import shimctl
from snapshotd.moves.device import standstill
from snapshotd.moves.device.parts import Parts
from snapshotd.proc.tree import Process

FIRST, SECOND = Process(10, 1), Process(20, 1)


class Rank:
    """Records the requests to two processes; each failure in `failures` happens once."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.failures: dict[str, SnapshotError] = {}
        self.parked: set[Process] = set()
        self.closed: set[Process] = set()

    def _do(self, act: str, process: Process) -> None:
        self.said.append(f"{act} {process.pid}")
        if (failure := self.failures.pop(f"{act} {process.pid}", None)) is not None:
            raise failure

    async def lock(self, process: Process, timeout_s: float) -> None:
        self._do("lock", process)

    def mailbox(self, process: Process) -> Any:
        def park(timeout_s: float, *, outside_driver: bool) -> None:
            assert timeout_s == (standstill.LOCK_S if outside_driver else standstill.PARK_S)
            self._do("park" if outside_driver else "park-locked", process)
            self.parked.add(process)

        def release(timeout_s: float) -> None:
            self._do("release", process)
            self.parked.discard(process)

        def state() -> Any:
            return SimpleNamespace(
                parked=process in self.parked, device_offloaded=False, shared_closed=process in self.closed
            )

        return SimpleNamespace(park=park, release=release, state=state)

    async def still(self, *processes: Process, only_parked: tuple[Process, ...] = ()) -> list[str]:
        parts = Parts()
        await standstill.still(self, processes, [*processes, *only_parked], parts)  # type: ignore[arg-type]
        return [part.name for part in parts.all]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(shimctl, "find", rank.mailbox)
    return rank


async def test_all_processes_are_parked_before_the_first_is_locked(rank: Rank) -> None:
    assert await rank.still(FIRST, SECOND) == ["park", "lock"]
    assert (sorted(rank.said[:2]), sorted(rank.said[2:])) == (["park 10", "park 20"], ["lock 10", "lock 20"])


async def test_process_without_cuda_is_parked_but_not_locked(rank: Rank) -> None:
    await rank.still(FIRST, only_parked=(SECOND,))
    assert sorted(rank.said) == ["lock 10", "park 10", "park 20"]
    rank.said.clear()
    assert await rank.still(only_parked=(SECOND,)) == ["park"]
    assert rank.said == ["park 20"]


async def test_driver_is_locked_first_if_threads_do_not_leave_it(rank: Rank) -> None:
    """The parked threads of the other process are released meanwhile."""
    rank.failures["park 20"] = shimctl.InDriver("they do not leave the CUDA driver")
    await rank.still(FIRST, SECOND)
    assert sorted(rank.said[:2]) == ["park 10", "park 20"]
    assert rank.said[2:3] == ["release 10"]
    assert (sorted(rank.said[3:5]), sorted(rank.said[5:])) == (
        ["lock 10", "lock 20"],
        ["park-locked 10", "park-locked 20"],
    )
    assert rank.parked == {FIRST, SECOND}


async def test_driver_that_waits_for_a_parked_thread_is_locked_first(rank: Rank) -> None:
    rank.failures["lock 10"] = Timeout("the GPU work did not finish")
    assert await rank.still(FIRST) == ["park", "lock"]
    assert rank.said == ["park 10", "lock 10", "release 10", "lock 10", "park-locked 10"]
    assert rank.parked == {FIRST}


async def test_threads_that_cannot_be_parked_fail_without_a_lock(rank: Rank) -> None:
    rank.failures["park 10"] = Timeout("a thread blocks signal 61")
    with pytest.raises(Timeout, match="blocks signal 61"):
        await rank.still(FIRST)
    assert rank.said == ["park 10"]


async def test_process_without_cuda_is_never_locked(rank: Rank) -> None:
    rank.failures["park 20"] = shimctl.InDriver("they do not leave the CUDA driver")
    with pytest.raises(shimctl.InDriver):
        await rank.still(only_parked=(SECOND,))
    assert rank.said == ["park 20"]


@pytest.mark.parametrize("act", ["park", "lock"])
async def test_other_failures_are_raised_at_once(rank: Rank, act: str) -> None:
    rank.failures[f"{act} 10"] = GpuFailed("it is not well")
    with pytest.raises(GpuFailed, match="it is not well"):
        await rank.still(FIRST)
    assert rank.said[-1] == f"{act} 10"


async def test_second_lock_timeout_is_raised_with_threads_released(rank: Rank) -> None:
    async def lock(process: Process, timeout_s: float) -> None:
        raise Timeout(f"not in {timeout_s:g} s")

    rank.lock = lock  # type: ignore[method-assign]
    with pytest.raises(Timeout, match=f"not in {standstill.LOCK_S:g} s"):
        await rank.still(FIRST)
    assert rank.said == ["park 10", "release 10"]
    assert rank.parked == set()


async def test_no_process_is_released_while_shared_memory_is_closed(rank: Rank) -> None:
    await rank.still(FIRST, SECOND)
    rank.closed.add(SECOND)
    with pytest.raises(GpuFailed, match="that process 20 shares with others is not open again"):
        await standstill.let_go([FIRST, SECOND])
    assert rank.parked == {FIRST, SECOND}, "the other one could free what the memory is part of"
    rank.closed.clear()
    await standstill.let_go([FIRST, SECOND])
    assert rank.parked == set()
