"""Memory that a program maps itself, on the fake and on the real CUDA driver: see test_cuda.py."""

from __future__ import annotations

import hashlib
import random
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.cuda.driver import Gpus
from snapshotd.proc.tree import Process
from tests.contract.cuda_driver import LOCK_S, MIB, Driver, check_point, go_on, holders
from tests.contract.mapped_memory import CudaError, MappedMemory

LARGE = 16 * MIB
GRAIN = 2 * MIB


@pytest.fixture
def mapper(driver: Driver) -> Iterator[Callable[[], MappedMemory]]:
    made: list[MappedMemory] = []

    def begin() -> MappedMemory:
        made.append(MappedMemory(driver.environment))
        return made[-1]

    yield begin
    for each in made:
        each.end()


@pytest.fixture
def memory(mapper: Callable[[], MappedMemory]) -> MappedMemory:
    return mapper()


def expected(length: int, seed: int) -> str:
    return hashlib.sha256(random.Random(seed).randbytes(length)).hexdigest()


async def test_memory_is_allocated_in_multiples_of_the_granularity(memory: MappedMemory) -> None:
    grain = memory.ask("granularity")
    assert grain == GRAIN
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.ask("create", grain // 2)


async def test_released_memory_exists_until_it_is_unmapped(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    before = memory.ask("free_bytes")
    handle = memory.ask("create", LARGE)
    memory.ask("map", address, LARGE, handle)
    memory.ask("access", address, LARGE)
    memory.ask("release", handle)
    assert memory.ask("free_bytes") <= before - LARGE
    memory.ask("write", address, LARGE, 1)
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 1)
    held = memory.ask("free_bytes")
    memory.ask("unmap", address, LARGE)
    assert memory.ask("free_bytes") >= held + LARGE


async def test_unmapped_memory_exists_until_it_is_released(memory: MappedMemory) -> None:
    """Its contents are the same wherever it is mapped."""
    address = memory.ask("reserve", 2 * LARGE)
    handle = memory.ask("create", LARGE)
    for place in (address, address + LARGE):
        memory.ask("map", place, LARGE, handle)
        memory.ask("access", place, LARGE)
        if place == address:
            memory.ask("write", address, LARGE, 2)
        assert memory.ask("digest", place, LARGE) == expected(LARGE, 2)
        memory.ask("unmap", place, LARGE)
    held = memory.ask("free_bytes")
    memory.ask("release", handle)
    assert memory.ask("free_bytes") >= held + LARGE


async def test_retained_handle_keeps_memory(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    memory.ask("write", address, LARGE, 3)
    handle = memory.ask("retain", address)
    memory.ask("unmap", address, LARGE)
    memory.ask("map", address, LARGE, handle)
    memory.ask("access", address, LARGE)
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 3)


async def test_address_can_be_mapped_to_other_memory_after_unmap(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    for seed in (4, 5, 6):
        memory.ask("mapped", address, LARGE)
        assert memory.ask("digest", address, LARGE) != expected(LARGE, seed - 1)
        memory.ask("write", address, LARGE, seed)
        assert memory.ask("digest", address, LARGE) == expected(LARGE, seed)
        memory.ask("unmap", address, LARGE)


async def test_reservation_uses_no_memory(memory: MappedMemory) -> None:
    before = memory.ask("free_bytes")
    memory.ask("reserve", 1 << 40)
    assert memory.ask("free_bytes") >= before - GRAIN


async def test_mapped_address_cannot_be_mapped_again(memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    other = memory.ask("create", LARGE)
    with pytest.raises(CudaError):
        memory.ask("map", address, LARGE, other)


async def test_memory_that_does_not_fit_is_refused_and_nothing_is_allocated(memory: MappedMemory) -> None:
    before = memory.ask("free_bytes")
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.ask("create", before // GRAIN * GRAIN + LARGE)
    assert memory.ask("free_bytes") >= before - GRAIN
    memory.ask("release", memory.ask("create", LARGE))


async def test_memory_calls_wait_while_locked(gpus: Gpus, memory: MappedMemory) -> None:
    address = memory.ask("reserve", LARGE)
    process = Process.of(memory.pid)
    await gpus.lock(process, LOCK_S)
    memory.begin("mapped", address, LARGE)
    assert not select.select([memory.output], [], [], 0.5)[0]
    await gpus.unlock(process, LOCK_S)
    memory.answer()
    memory.ask("write", address, LARGE, 7)


async def test_mapped_and_plain_memory_are_restored(gpus: Gpus, memory: MappedMemory) -> None:
    """With a hole between two mappings, and memory that is not mapped."""
    address = memory.ask("reserve", 3 * LARGE)
    for number in (0, 2):
        memory.ask("mapped", address + number * LARGE, LARGE)
        memory.ask("write", address + number * LARGE, LARGE, number)
    plain = memory.ask("plain", LARGE)
    memory.ask("write", plain, LARGE, 8)
    apart = memory.ask("create", LARGE)
    memory.ask("map", address + LARGE, LARGE, apart)
    memory.ask("access", address + LARGE, LARGE)
    memory.ask("write", address + LARGE, LARGE, 9)
    memory.ask("unmap", address + LARGE, LARGE)
    await check_point(gpus, Process.of(memory.pid))
    await go_on(gpus, Process.of(memory.pid))
    for number in (0, 2):
        assert memory.ask("digest", address + number * LARGE, LARGE) == expected(LARGE, number)
    assert memory.ask("digest", plain, LARGE) == expected(LARGE, 8)
    memory.ask("map", address + LARGE, LARGE, apart)
    memory.ask("access", address + LARGE, LARGE)
    assert memory.ask("digest", address + LARGE, LARGE) == expected(LARGE, 9)


async def test_reservation_without_memory_is_restored(gpus: Gpus, memory: MappedMemory) -> None:
    """A process with offloaded memory has only reserved addresses and a little plain memory. Checkpointed twice."""
    address = memory.ask("reserve", LARGE)
    plain = memory.ask("plain", GRAIN)
    memory.ask("write", plain, GRAIN, 10)
    for seed in (11, 12):
        memory.ask("mapped", address, LARGE)
        memory.ask("write", address, LARGE, seed)
        memory.ask("unmap", address, LARGE)
        await check_point(gpus, Process.of(memory.pid))
        await go_on(gpus, Process.of(memory.pid))
        memory.ask("mapped", address, LARGE)
        memory.ask("write", address, LARGE, seed + 10)
        assert memory.ask("digest", address, LARGE) == expected(LARGE, seed + 10)
        assert memory.ask("digest", plain, GRAIN) == expected(GRAIN, 10)
        memory.ask("unmap", address, LARGE)


async def test_pinned_memory_freed_before_a_checkpoint_does_not_prevent_it(gpus: Gpus, memory: MappedMemory) -> None:
    """The pinned staging buffers are allocated again after the restore."""
    address = memory.ask("reserve", LARGE)
    memory.ask("mapped", address, LARGE)
    slots = [memory.ask("pin", 8 * MIB) for _ in range(4)]
    memory.ask("write", address, LARGE, 13)
    for slot in slots:
        memory.ask("unpin", slot)
    await check_point(gpus, Process.of(memory.pid))
    await go_on(gpus, Process.of(memory.pid))
    slots = [memory.ask("pin", 8 * MIB) for _ in range(4)]
    assert memory.ask("digest", address, LARGE) == expected(LARGE, 13)
    for slot in slots:
        memory.ask("unpin", slot)


async def test_checkpoint_does_not_copy_unmapped_memory(gpus: Gpus, mapper: Callable[[], MappedMemory]) -> None:
    length = 4 * LARGE
    resident = []
    for parked in (False, True):
        memory = mapper()
        address = memory.ask("reserve", length)
        memory.ask("mapped", address, length)
        memory.ask("write", address, length, 14)
        if parked:
            memory.ask("unmap", address, length)
            held = (await holders(gpus)).get(memory.pid, 0)
            memory.ask("mapped", address, length)
            assert (await holders(gpus))[memory.pid] >= held + length
            memory.ask("unmap", address, length)
        await check_point(gpus, Process.of(memory.pid))
        assert memory.pid not in await holders(gpus)
        resident.append(_resident_bytes(memory.pid))
    assert resident[0] - resident[1] > length * 3 // 4


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024
