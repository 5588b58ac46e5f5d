"""Tests of failures between READY and the end of FILL: the content is always on the device or in the stripes."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests.descriptors import open_links
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import until
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import DROP, FILL, MIB, OFFLOAD, OPEN, READY, SLOT_BYTES, STRIPES, refused


def test_offload_is_cancelled_before_and_during_the_copy(start_job: Start, node: GpuNode) -> None:
    job = start_job("grow 4")
    job.ready()
    job.park_threads()
    job.mailbox().cancel_device(True)
    with refused(errno.ECANCELED):
        job.ask(OFFLOAD)
    job.is_settled(offloaded=False)

    job.ready()
    for _ in range(2):
        node.fault("copy", "slow:0")  # the copies of the rehearsal
    node.fault("copy", "slow:150", once=False)
    with job.under_way(OFFLOAD) as answers:
        until(lambda: any(job.state().done))
        job.mailbox().cancel_device(True)
    assert answers == [errno.ECANCELED]
    node.clear_faults()
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_ready_is_cancelled(start_job: Start) -> None:
    """The daemon may set `device_cancel` at any time, without knowing how far the command is."""
    job = start_job("grow 1")
    with job.files(os.O_RDWR | os.O_CREAT) as files:
        job.hand_over(files)
        job.mailbox().cancel_device(True)
        with refused(errno.ECANCELED):
            job.ask(READY, STRIPES, SLOT_BYTES)
    job.is_settled(offloaded=False)
    job.offload()
    job.come_back()


def test_offload_answers_eagain_if_a_parked_thread_holds_a_driver_lock(start_job: Start, node: GpuNode) -> None:
    """Threads that sleep in the driver are parked. A call that waits for one must be found while it can be released."""
    job = start_job("grow 4", "asking")
    job.ready()
    node.fault("ask", "slow:1000", once=False)
    time.sleep(0.1)  # from now on one of those calls is in progress
    job.park_threads()
    with refused(errno.EAGAIN, "with a lock that others wait for"):
        job.ask(OFFLOAD)
    assert not job.state().offloaded
    node.clear_faults()
    job.release()
    time.sleep(1.5)  # that call has ended
    job.park_threads()
    job.ask(OFFLOAD)
    job.is_settled(offloaded=True)
    job.come_back()


def test_offload_to_files_without_enough_room_copies_nothing(start_job: Start) -> None:
    job = start_job("grow 4")
    job.ready()
    for path in job.paths:
        os.truncate(path, 4096)
    job.park_threads()
    with refused(errno.EFBIG, "more device memory than the stripe files have room for"):
        job.ask(OFFLOAD)
    assert not job.state().offloaded
    assert not any(job.state().done)  # nothing that may be sent
    for path in job.paths:
        os.truncate(path, 64 * MIB)
    job.ask(OFFLOAD)
    job.is_settled(offloaded=True)
    job.come_back()


def test_offload_fails_if_the_job_replaced_a_stripe_descriptor(start_job: Start, tmp_path: Path) -> None:
    """The job's file under the number of a stripe's descriptor is neither written nor truncated nor closed."""
    job = start_job("grow 4")
    job.ready()
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    numbers = [number for number, link in open_links(job.pid).items() if "device-1" in link]
    assert job.do(f"replace {numbers[0]} {theirs}") == "done"
    job.park_threads()
    with refused(errno.EBADF, "not its own"):
        job.ask(OFFLOAD)
    job.ask(DROP)
    assert theirs.read_bytes() == b"precious"
    assert os.readlink(f"/proc/{job.pid}/fd/{numbers[0]}") == str(theirs)
    job.is_unharmed()


def test_fill_without_room_on_the_device_can_be_retried(start_job: Start, room: Room) -> None:
    job = start_job("grow 2")
    job.offload()
    other = start_job(f"fill {room() // MIB - 12}")
    left = room()
    for _ in range(2):
        with refused(errno.ENOMEM):
            job.fill()
        job.is_settled(offloaded=True)
        assert room() == left
    other.end()
    job.come_back()


def _lines(operation: str, number: int) -> list[tuple[str, str]]:
    """Faults that let `number` operations succeed and make the next one fail."""
    return [(operation, "slow:0")] * number + [(operation, "fail:CUDA_ERROR_UNKNOWN")]


@pytest.mark.parametrize("operation", ["pin", "copy"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_offload_that_fails_changes_nothing(
    start_job: Start, node: GpuNode, room: Room, operation: str, number: int
) -> None:
    job = start_job("grow 2", "segments")
    left = room()
    for line in _lines(operation, number):
        node.fault(*line)
    with refused(errno.EIO, "999"):
        job.offload()
    assert node.faults() == []
    job.is_settled(offloaded=False)
    assert room() == left
    job.is_unharmed()
    job.offload()
    job.come_back()


@pytest.mark.parametrize(
    ("operation", "numbers"), [("pin", (0, 4)), ("create", (0, 3)), ("map", (0, 7)), ("copy", (0, 9))]
)
def test_fill_that_fails_can_be_retried(
    start_job: Start, node: GpuNode, room: Room, operation: str, numbers: tuple[int, ...]
) -> None:
    job = start_job("grow 2", "segments")
    job.offload()
    left = room()
    for number in numbers:
        for line in _lines(operation, number):
            node.fault(*line)
        with refused(errno.EIO, "999"):
            job.fill()
        assert node.faults() == []
        job.is_settled(offloaded=True)
        assert room() == left
    job.come_back()


def test_offload_to_files_that_are_not_writable_changes_nothing(start_job: Start) -> None:
    job = start_job("grow 2")
    for path in job.paths:
        path.touch()
    job.ready(os.O_RDONLY)
    job.park_threads()
    with refused(errno.EBADF, "pwrite"):
        job.ask(OFFLOAD)
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_fill_times_out_if_a_stripe_does_not_arrive(start_job: Start) -> None:
    job = start_job("grow 2")
    job.offload()
    last = job.paths[-1].read_bytes()
    os.truncate(job.paths[-1], len(last) - 1)
    with refused(errno.ETIMEDOUT, "stripe 2"):
        job.fill(timeout_s=3.0)
    job.is_settled(offloaded=True)

    job.ready(os.O_RDONLY)
    with job.under_way(FILL) as answers:
        job.mailbox().cancel_device(True)
    assert answers == [errno.ECANCELED]
    job.is_settled(offloaded=True)

    job.paths[-1].write_bytes(last)
    job.come_back()


def test_call_that_never_returns_does_not_block_the_control_thread(start_job: Start, node: GpuNode) -> None:
    """The control thread still answers."""
    job = start_job("grow 1")
    job.ready()
    job.park_threads()
    for _ in range(2):
        node.fault("copy", "slow:0")  # the copies of the rehearsal
    node.fault("copy", "hang")
    with refused(errno.ETIMEDOUT, "did not return"):
        job.ask(OFFLOAD, timeout_s=0.5)
    assert not job.state().offloaded
    for command in (DROP, OPEN, OFFLOAD):
        with refused(errno.EBUSY):
            job.ask(command)
    job.release()
    assert job.do("list") != "", "the job's own threads go on"


def test_commands_in_the_wrong_order_are_refused(start_job: Start) -> None:
    job = start_job("grow 1")
    for command, arguments in ((OFFLOAD, ()), (FILL, ()), (READY, (STRIPES, SLOT_BYTES))):
        with refused(errno.EINVAL):
            job.ask(command, *arguments)
    job.ask(DROP)
    job.ask(DROP)
    with job.files(os.O_RDWR | os.O_CREAT) as files:
        for arguments in ((0, SLOT_BYTES), (17, SLOT_BYTES), (STRIPES, 100), (STRIPES, 0)):
            job.hand_over(files)
            with refused(errno.EINVAL):
                job.ask(READY, *arguments)
        job.hand_over(files[:2])
        with refused(errno.ETIMEDOUT, "2 of 3"):
            job.ask(READY, STRIPES, SLOT_BYTES, timeout_s=0.05)
    job.ready()
    assert len(job.leftovers()) > 0
    job.ask(DROP)
    assert job.leftovers() == []
    job.offload()
    with refused(errno.EINVAL, str(SLOT_BYTES)):
        job.ready(os.O_RDONLY, slot_bytes=2 * SLOT_BYTES)
    job.ready(os.O_RDONLY)
    with refused(errno.EALREADY):
        job.ask(OFFLOAD)
    job.come_back()


def test_offload_is_refused_after_a_device_reset_since_ready(start_job: Start, room: Room) -> None:
    """Streams and pinned memory ended with the context and must not be used again."""
    before = room()
    job = start_job("grow 1")
    job.ready()
    assert job.do("reset") == "done"
    assert room() == before
    assert job.do("grow 1") == "done"
    job.park_threads()
    with refused(errno.EINVAL, "MEMORY_READY"):
        job.ask(OFFLOAD)
    job.is_settled(offloaded=False)
    job.is_unharmed()
    job.offload()
    job.come_back()
