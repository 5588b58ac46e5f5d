"""A rank's device memory: what is journalled about it, and how it is restored when a move is undone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import GpuFailed, Timeout
from snapshotd.cuda.driver import State
from snapshotd.cuda.inventory import Inventory
from snapshotd.inprocess import shimctl
from snapshotd.moves.device import memory, standstill
from snapshotd.moves.device.parts import Parts
from snapshotd.proc import tree
from snapshotd.proc.tree import Process

MIB = 1 << 20


class Driver:
    """One GPU with 1000 MiB; records the requests."""

    def __init__(self, processes: list[Process]) -> None:
        self.states: dict[Process, State | None] = dict.fromkeys(processes, State.CHECKPOINTED)
        self.free_mib, self.tells, self.silent = 1000, True, False
        self.mib = dict.fromkeys(processes, 300)
        self.hanging = ""
        self.said: list[str] = []

    async def inventory(self, *, fresh: bool = False) -> Inventory:
        assert fresh
        if self.silent:
            return Inventory(problem="NVML did not answer")
        on = [process for process, state in self.states.items() if state is not State.CHECKPOINTED]
        listed = [pb.GpuProcess(pid=each.pid, memory_bytes=self.mib[each] * MIB) for each in on] if self.tells else []
        free = self.free_mib - sum(self.mib[each] for each in on)
        return Inventory(
            gpus=[pb.Gpu(uuid="GPU-a", memory_bytes=1000 * MIB, memory_free_bytes=free * MIB, processes=listed)]
        )

    async def state(self, process: Process, timeout_s: float = 5.0) -> State | None:
        return self.states[process]

    async def checkpoint(self, process: Process, timeout_s: float) -> None:
        self.states[process] = State.CHECKPOINTED

    async def restore(self, process: Process, pairs: Any, timeout_s: float) -> None:
        if self.hanging == "restore":
            raise Timeout("the restore hangs")
        self.said.append("restore")
        self.states[process] = State.LOCKED

    async def unlock(self, process: Process, timeout_s: float) -> None:
        self.states[process] = State.RUNNING


@pytest.fixture
def two() -> Iterator[list[Process]]:
    running = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield [Process.of(each.pid) for each in running]
    for each in running:
        each.kill()
        each.wait()


@pytest.fixture
def out() -> set[Process]:
    """The processes whose device memory is in stripes."""
    return set()


@pytest.fixture
def closed() -> set[Process]:
    """The processes with shared memory that is not open again."""
    return set()


@pytest.fixture
def parked(
    two: list[Process], out: set[Process], closed: set[Process], monkeypatch: pytest.MonkeyPatch
) -> set[Process]:
    """The processes whose threads are parked."""
    held = set(two)

    def find(process: Process) -> Any:
        return SimpleNamespace(
            state=lambda: SimpleNamespace(
                parked=process in held, device_offloaded=process in out, shared_closed=process in closed
            ),
            device_memory=lambda: SimpleNamespace(offloaded=process in out),
            release=lambda timeout_s: held.discard(process),
        )

    monkeypatch.setattr(shimctl, "find", find)
    return held


async def bring_back(driver: Driver, needs_mib: int = 600) -> None:
    await memory.bring_back(driver, list(driver.states), {"GPU-a": needs_mib * MIB}, needs_mib * MIB)  # type: ignore[arg-type]


async def test_device_memory_is_restored_and_threads_are_released(two: list[Process], parked: set[Process]) -> None:
    driver = Driver(two)
    await bring_back(driver)
    assert set(driver.states.values()) == {State.RUNNING}
    assert parked == set()


@pytest.mark.parametrize("tells", [True, False])
async def test_restore_waits_for_free_device_memory(two: list[Process], parked: set[Process], tells: bool) -> None:
    driver = Driver(two)
    driver.states[two[0]], driver.tells, driver.free_mib = State.LOCKED, tells, 500
    with pytest.raises(GpuFailed, match="600 MiB of device memory have to go back"):
        await bring_back(driver)
    assert (driver.said, parked) == ([], set(two))
    driver.free_mib = 600  # includes the memory that the first still has
    await bring_back(driver)
    assert set(driver.states.values()) == {State.RUNNING}


async def test_restore_is_not_tried_on_a_gpu_of_unknown_state(two: list[Process], parked: set[Process]) -> None:
    driver = Driver(two)
    driver.silent = True
    with pytest.raises(GpuFailed, match="NVML did not answer"):
        await bring_back(driver)
    assert (driver.said, parked) == ([], set(two))


async def test_hanging_restore_releases_no_thread_while_shared_memory_is_closed(
    two: list[Process], parked: set[Process], out: set[Process], closed: set[Process]
) -> None:
    """The owner could free what the other process has to open again."""
    driver = Driver(two)
    driver.hanging = "restore"
    closed.add(two[1])
    out.add(two[1])
    with pytest.raises(Timeout):
        await bring_back(driver)
    assert parked == set(two)


async def test_hanging_restore_releases_the_parked_threads(two: list[Process], parked: set[Process]) -> None:
    driver = Driver(two)
    driver.hanging = "restore"
    with pytest.raises(Timeout):
        await bring_back(driver)
    assert parked == set()
    driver.hanging = ""
    await bring_back(driver)
    assert set(driver.states.values()) == {State.RUNNING}


async def test_threads_with_offloaded_memory_are_not_released(
    two: list[Process], parked: set[Process], out: set[Process]
) -> None:
    out.add(two[1])
    with pytest.raises(GpuFailed, match=f"process {two[1].pid} is not back"):
        await standstill.let_go(two)
    assert parked == {two[1]}


async def test_hanging_restore_keeps_threads_with_offloaded_memory_parked(
    two: list[Process], parked: set[Process], out: set[Process]
) -> None:
    driver = Driver(two)
    driver.hanging = "restore"
    out.add(two[1])
    with pytest.raises(Timeout):
        await bring_back(driver)
    assert parked == {two[1]}


async def test_offloaded_memory_is_refilled_before_threads_are_released(
    two: list[Process], parked: set[Process], out: set[Process]
) -> None:
    driver = Driver(two)
    out.update(two)

    asked: list[tuple[set[State | None], set[Process]]] = []

    async def refill() -> None:
        asked.append((set(driver.states.values()), set(parked)))
        out.clear()

    await memory.bring_back(driver, two, {"GPU-a": 600 * MIB}, 600 * MIB, (), refill)  # type: ignore[arg-type]
    # The second call: a call that a parked thread blocked has returned, and what was prepared for it can be dropped.
    assert asked == [({State.RUNNING}, set(two)), ({State.RUNNING}, set())]
    assert parked == set()


async def nothing() -> int:
    """An offload that moves nothing."""
    return 0


async def noted(driver: Driver, expected_mib: int) -> tuple[list[dict[str, int]], int]:
    """The journalled uses in MiB, in order, and the size that `take_off` returns."""
    notes: list[dict[str, int]] = []

    async def note(uses: dict[str, int]) -> None:
        notes.append({uuid: size // MIB for uuid, size in uses.items()})
        states = set(driver.states.values())
        assert states == {State.LOCKED if len(notes) == 1 else State.CHECKPOINTED}

    expected = {"GPU-a": expected_mib * MIB} if expected_mib else {}
    size = await memory.take_off(driver, list(driver.states), expected, Parts(), note, nothing)  # type: ignore[arg-type]
    return notes, size // MIB


@pytest.fixture
def locked(two: list[Process]) -> Driver:
    driver = Driver(two)
    driver.states = dict.fromkeys(two, State.LOCKED)
    return driver


async def test_reported_memory_is_journalled_before_the_checkpoint(locked: Driver) -> None:
    assert await noted(locked, 20) == ([{"GPU-a": 600}], 600)


async def test_unreported_memory_is_measured_by_the_checkpoint(locked: Driver) -> None:
    locked.tells = False
    assert await noted(locked, 20) == ([{"GPU-a": 20}, {"GPU-a": 600}], 600)


@pytest.mark.parametrize("tells", [True, False])
async def test_offloaded_memory_counts_for_the_undo_but_not_for_the_checkpoint(locked: Driver, tells: bool) -> None:
    """600 MiB are on the GPU, of which 500 leave before the checkpoint."""
    locked.tells = tells
    noted_mib: list[int] = []
    parts = Parts()

    async def note(uses: dict[str, int]) -> None:
        noted_mib.append(sum(uses.values()) // MIB)

    async def park() -> int:
        locked.mib = dict.fromkeys(locked.mib, 50)
        return 500 * MIB

    size = await memory.take_off(locked, list(locked.states), {"GPU-a": 20 * MIB}, parts, note, park)  # type: ignore[arg-type]
    assert (size // MIB, noted_mib[-1]) == (600, 600)
    assert [(part.name, part.bytes // MIB) for part in parts.all] == [("checkpoint", 100)]


async def test_cuda_rank_is_never_counted_as_empty(locked: Driver) -> None:
    locked.silent = True
    notes, size_mib = await noted(locked, 0)
    assert (notes, size_mib) == ([{}], memory.CONTEXT_BYTES // MIB)


async def test_copy_with_unparked_threads_stays_stopped(two: list[Process], parked: set[Process]) -> None:
    tree.stop_again(two, 10)
    parked.discard(two[1])
    group: Any = None  # not used
    with pytest.raises(GpuFailed, match=f"process {two[1].pid} are not parked"):
        await memory.revive(Driver(two), two, group, (), 0, Parts(), nothing)  # type: ignore[arg-type]
    assert [tree.state(process.pid) for process in two] == ["T", "T"]
