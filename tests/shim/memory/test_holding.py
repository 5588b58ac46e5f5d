"""Device memory is handed over as descriptors and taken back: nothing is copied, and the content is what it was."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.holding import BATCH, CannotExport, HeldBlock, Holding
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import STUCK_S
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import MIB, SLOT_BYTES, STRIPES, DeviceJob, refused

GRAIN = 2 * MIB


class Held:
    """The descriptors that a test holds."""

    def __init__(self) -> None:
        self.blocks: list[HeldBlock] = []
        self.fds: list[int] = []

    def keep(self, blocks: Sequence[HeldBlock], fds: Sequence[int]) -> None:
        self.blocks += blocks
        self.fds += [os.dup(fd) for fd in fds]

    def batches(self) -> Iterator[tuple[list[HeldBlock], list[int]]]:
        for at in range(0, len(self.fds), BATCH):
            yield self.blocks[at : at + BATCH], self.fds[at : at + BATCH]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.close()


def holding(job: DeviceJob) -> Holding:
    return Holding(job.mailbox())


def hand_over(job: DeviceJob, held: Held) -> int:
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    job.park_threads()
    return one.hand_over(STUCK_S, held.keep)


def take_back(job: DeviceJob, held: Held) -> int:
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    return one.take_back(STUCK_S, held.batches(), len(held.fds))


def own(job: DeviceJob) -> None:
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    one.own(STUCK_S)
    assert not one.has_imported()


def test_memory_that_was_taken_back_is_made_the_jobs_own(start_job: Start, room: Room, held: Held) -> None:
    """Or the driver could not restore the process after a checkpoint, and the memory not be handed over again."""
    job = start_job("grow 3")
    taken = room()
    hand_over(job, held)
    assert room() > taken
    take_back(job, held)
    own(job)
    assert room() == taken, "it is on the job's account again"
    held.close()
    held.fds.clear()
    job.is_unharmed()


def test_lack_of_room_leaves_the_job_with_memory_that_it_cannot_export(
    start_job: Start, node: GpuNode, held: Held
) -> None:
    job = start_job("grow 3")
    hand_over(job, held)
    take_back(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("create", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match="cuMemCreate answers 2"):
        one.own(STUCK_S)
    assert one.has_imported(), "so that preflight refuses to move it"
    own(job)
    job.is_unharmed()


def test_freed_memory_is_not_imported_any_more(start_job: Start, held: Held) -> None:
    job = start_job("grow 2")
    hand_over(job, held)
    take_back(job, held)
    job.is_unharmed()
    assert job.do("shrink") == "done"
    assert not holding(job).has_imported()


def test_daemon_that_has_thousands_of_descriptors_takes_memory_over(start_job: Start, held: Held) -> None:
    """As duplicates of what other ranks have handed over: select() would fail from 1024 on."""
    job, others = start_job("grow 4"), [os.open("/dev/null", os.O_RDONLY)]
    try:
        while others[-1] < 1024:
            others.append(os.dup(others[0]))
        assert hand_over(job, held) == sum(block.bytes for block in held.blocks)
        take_back(job, held)
    finally:
        for fd in others:
            os.close(fd)
    job.is_unharmed()


def test_memory_is_handed_over_and_taken_back(start_job: Start, held: Held) -> None:
    job = start_job("grow 4")
    wanted = [(address, -(-size // GRAIN) * GRAIN) for address, size, _ in job.blocks() if size >= MIB]
    backed, open_before = job.state().bytes, len(os.listdir(f"/proc/{job.process.pid}/fd"))
    assert hand_over(job, held) == backed
    job.is_settled(offloaded=True)
    assert [(block.address, block.bytes) for block in held.blocks] == wanted
    assert len(os.listdir(f"/proc/{job.process.pid}/fd")) == open_before, "no descriptor is left in the process"
    assert take_back(job, held) == backed
    job.is_settled(offloaded=False)
    job.is_unharmed()
    assert len(os.listdir(f"/proc/{job.process.pid}/fd")) == open_before


def test_memory_is_handed_over_again_after_it_was_taken_back(start_job: Start, held: Held) -> None:
    """It was imported then, and not created by the process."""
    job = start_job("grow 3")
    hand_over(job, held)
    take_back(job, held)
    assert holding(job).has_imported()
    own(job)
    job.is_unharmed()
    again = Held()
    hand_over(job, again)
    assert again.blocks == held.blocks
    take_back(job, again)
    again.close()
    job.is_unharmed()


def test_content_changed_by_the_holder_is_what_the_job_finds(start_job: Start, held: Held) -> None:
    """The target's holder fills memory that the restored process then maps."""
    job = start_job("grow 1")
    hand_over(job, held)
    for fd in held.fds:
        content = os.pread(fd, 64, 0)
        os.pwrite(fd, bytes(64), 0)
        os.pwrite(fd, content, 0)
    take_back(job, held)
    job.is_unharmed()


def test_more_blocks_than_open_files_are_allowed(start_job: Start, held: Held) -> None:
    job = start_job(*["grow 4"] * 3)
    blocks = job.state().blocks
    assert blocks > 2 * BATCH
    open_now = len(os.listdir(f"/proc/{job.process.pid}/fd"))
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (open_now + BATCH + 8, open_now + BATCH + 8))
    hand_over(job, held)
    assert len(held.fds) == blocks
    take_back(job, held)
    job.is_unharmed()


def test_memory_that_cannot_be_exported_stays(start_job: Start, node: GpuNode, held: Held) -> None:
    job = start_job("grow 2")
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    job.park_threads()
    node.fault("export", "fail:CUDA_ERROR_NOT_SUPPORTED", once=False)
    with pytest.raises(CannotExport, match="cuMemExportToShareableHandle answers 801"):
        one.hand_over(STUCK_S, held.keep)
    node.clear_faults()
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_memory_that_was_created_without_a_descriptor_is_found_before_the_job_waits(start_job: Start) -> None:
    """As torch's expandable segments create it."""
    job = start_job("grow 1", "segments")
    one = holding(job)
    with pytest.raises(CannotExport, match="has created memory that cannot be exported"):
        one.ready(STRIPES, SLOT_BYTES)
    one.close()
    job.is_settled(offloaded=False)


def test_failed_import_leaves_the_memory_to_a_retry(start_job: Start, node: GpuNode, held: Held) -> None:
    job = start_job("grow 3")
    hand_over(job, held)
    node.fault("map", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(Exception, match="cuMemMap"):
        take_back(job, held)
    job.is_settled(offloaded=True)
    take_back(job, held)
    job.is_unharmed()


def test_too_few_descriptors_are_refused(start_job: Start, held: Held) -> None:
    job = start_job("grow 3")
    hand_over(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    with pytest.raises(GpuFailed, match="another number of descriptors was announced"):
        one.take_back(STUCK_S, [(held.blocks[:1], held.fds[:1])], 1)
    job.is_settled(offloaded=True)
    one.ready(STRIPES, SLOT_BYTES)
    with pytest.raises(Exception, match=r"deadline|did not|not answer"):
        one.take_back(2.0, [(held.blocks[:1], held.fds[:1])], len(held.fds))
    job.is_settled(offloaded=True)
    take_back(job, held)
    job.is_unharmed()


@pytest.mark.parametrize("command", [Command.MEMORY_OFFLOAD, Command.MEMORY_FILL])
def test_commands_of_the_other_way_are_refused(start_job: Start, command: Command) -> None:
    job = start_job("grow 1")
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    job.park_threads()
    with refused(errno.EINVAL, "the other way"):
        job.ask(command)
    one.close()
    job.come_back()


def test_threads_must_be_parked(start_job: Start, held: Held) -> None:
    job = start_job("grow 1")
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    with pytest.raises(Exception, match="not parked"):
        one.hand_over(STUCK_S, held.keep)
    assert held.fds == []
