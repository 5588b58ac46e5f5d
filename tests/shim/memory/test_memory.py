"""Tests that backed device memory is offloaded into stripes and restored exactly."""

from __future__ import annotations

import array
import errno
import os
from collections.abc import Sequence

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess.abi import Command
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import until
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import FILL, MIB, OFFLOAD, SLOT_BYTES, Block, refused

GRAIN = 2 * MIB
NCCL_ATTACH = Command.NCCL_ATTACH


def _backed(blocks: Sequence[Block]) -> int:
    return sum(-(-size // GRAIN) * GRAIN for _, size, _ in blocks)


def _concatenation(stripes: Sequence[bytes], blocks: Sequence[Block]) -> bytes:
    """The content of the stripes, chunk by chunk."""
    at = [0] * len(stripes)
    whole = bytearray()
    chunks = (
        min(SLOT_BYTES, _backed([block]) - at) for block in blocks for at in range(0, _backed([block]), SLOT_BYTES)
    )
    for chunk, length in enumerate(chunks):
        stripe = chunk % len(stripes)
        whole += stripes[stripe][at[stripe] : at[stripe] + length]
        at[stripe] += length
    assert at == [len(stripe) for stripe in stripes]
    return bytes(whole)


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
def test_content_is_offloaded_and_restored(start_job: Start, room: Room, mapped: bool) -> None:
    before = room()
    job = start_job("grow 4")
    blocks = [block for block in job.blocks() if block[1] >= MIB]
    backed = _backed(blocks)
    assert (job.state().bytes, job.state().blocks) == (backed, len(blocks))
    taken = before - room()
    flags = os.O_RDWR | os.O_CREAT
    if mapped:  # preallocated files are written through mappings
        for path in job.paths:
            with path.open("wb") as file:
                file.truncate(backed)
    assert job.ready(flags) == backed
    job.park_threads()
    assert job.ask(OFFLOAD)[0] == backed
    job.is_settled(offloaded=True)
    assert sum(job.state().done) == backed
    assert before - room() == taken - backed
    whole, at = _concatenation([path.read_bytes() for path in job.paths], blocks), 0
    for _, size, number in blocks:
        words = array.array("Q", range(number << 32, (number << 32) + size // 8))
        assert whole[at : at + len(words) * 8] == words.tobytes()
        at += _backed([(0, size, number)])
    assert job.fill() == backed
    job.is_settled(offloaded=False)
    assert sum(job.state().done) == backed
    assert before - room() == taken
    job.is_unharmed()
    assert job.do("grow 2") == "done"
    assert job.offload() > backed
    job.come_back()
    assert job.do("shrink") == "done"
    assert (job.state().bytes, job.state().blocks) == (0, 0)


def test_a_job_without_device_memory_is_offloaded(start_job: Start) -> None:
    job = start_job()
    assert job.offload() == 0
    assert job.state().offloaded
    assert job.fill() == 0
    job.release()


def test_blocks_allocated_after_ready_are_offloaded_too(start_job: Start) -> None:
    job = start_job()
    assert job.ready() == 0
    assert job.do("grow 1") == "done"
    job.park_threads()
    assert job.ask(OFFLOAD)[0] == job.state().bytes > 0
    job.come_back()


def test_threads_are_not_released_while_the_memory_is_offloaded(start_job: Start) -> None:
    job = start_job("grow 1")
    job.offload()
    with pytest.raises(GpuFailed, match="device memory is offloaded"):
        job.release()
    with refused(errno.EBUSY, "device memory is offloaded"):
        job.ask(NCCL_ATTACH)
    job.come_back()


def test_offload_needs_parked_threads(start_job: Start) -> None:
    job = start_job("grow 1")
    job.ready()
    with refused(errno.EBUSY):
        job.ask(OFFLOAD)
    job.park_threads()
    job.ask(OFFLOAD)
    job.come_back()


def test_offload_answers_eagain_if_a_thread_is_parked_while_allocating(start_job: Start, node: GpuNode) -> None:
    job = start_job("grow 1")
    job.ready()
    node.fault("create", "slow:15000")
    assert job.do("later") == "done"
    until(lambda: not node.faults())
    job.park_threads()
    with refused(errno.EAGAIN):
        job.ask(OFFLOAD)
    job.release()
    assert job.do("wait") == "done"
    job.park_threads()
    assert job.ask(OFFLOAD)[0] == job.state().bytes
    job.come_back()


def test_memory_is_offloaded_while_threads_start_and_end(start_job: Start) -> None:
    job = start_job("grow 1", "come")
    for _ in range(20):
        job.ready()
        job.park_threads()
        with job.under_way(OFFLOAD) as answers:
            pass
        assert answers[0] in {0, errno.EAGAIN}
        job.come_back()
    assert job.do("stop") == "done"
    job.offload()
    job.come_back()


def test_fill_follows_stripes_that_grow(start_job: Start) -> None:
    job = start_job("grow 3")
    job.offload()
    contents = [path.read_bytes() for path in job.paths]
    for path in job.paths:
        path.write_bytes(b"")
    job.ready(os.O_RDONLY)
    with job.under_way(FILL) as answers:
        for at in range(0, max(map(len, contents)), 300_000):
            for path, content in zip(job.paths, contents, strict=True):
                with path.open("ab") as file:
                    file.write(content[at : at + 300_000])
    assert answers == [0]
    job.is_unharmed()
