"""Tests that memory freed while a CUDA graph is captured, when nothing may wait for the device, is released later."""

from __future__ import annotations

from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import MIB

INVALID_VALUE = "1"


def test_memory_freed_in_a_capture_is_released_after_it(start_job: Start, room: Room) -> None:
    job = start_job("fill 16", "fill 4")
    address = next(address for address, size, _ in job.blocks() if size == 16 * MIB)
    left = room()
    assert job.do("capture") == "done"
    assert job.do(f"free {address}") == "0"
    assert job.do(f"free {address}") == INVALID_VALUE, "twice is CUDA's error"
    assert room() == left
    assert job.state().bytes == 4 * MIB, "it is no content"
    assert job.do("captured") == "done"
    assert job.do("fill 2") == "done"
    assert room() == left + 14 * MIB
    assert job.state().bytes == 6 * MIB


def test_memory_freed_in_a_capture_is_not_offloaded(start_job: Start, room: Room) -> None:
    job = start_job("fill 16", "fill 4")
    address = next(address for address, size, _ in job.blocks() if size == 16 * MIB)
    left = room()
    assert job.do("capture") == "done"
    assert job.do(f"free {address}") == "0"
    assert job.offload() == 4 * MIB
    assert room() == left + 20 * MIB
    assert job.fill() == 4 * MIB
    job.release()
    assert room() == left + 16 * MIB
    assert job.do("captured") == "done"
    assert job.do(f"free {address}") == INVALID_VALUE
