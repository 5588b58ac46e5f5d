"""Whatever goes wrong between READY and the end of FILL: the memory is here or in stripes, never nowhere."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import until
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import DROP, FILL, MIB, OFFLOAD, OPEN, READY, SLOT_BYTES, STRIPES, refused


def test_cancelled_before_it_began_and_on_the_way(start_job: Start, node: GpuNode) -> None:
    job = start_job("grow 4")
    job.ready()
    job.park_threads()
    job.mailbox().cancel_device(True)
    with refused(errno.ECANCELED):
        job.ask(OFFLOAD)
    job.is_settled(offloaded=False)

    job.ready()
    for _ in range(2):
        node.fault("copy", "slow:0")  # the rehearsal's, which is given up soon
    node.fault("copy", "slow:150", once=False)
    with job.under_way(OFFLOAD) as answers:
        until(lambda: any(job.state().done))
        job.mailbox().cancel_device(True)
    assert answers == [errno.ECANCELED]
    node.clear_faults()
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_cancelled_before_it_was_made_ready(start_job: Start) -> None:
    """The word is the daemon's: whoever says it does not wait to see how far the others are."""
    job = start_job("grow 1")
    with job.files(os.O_RDWR | os.O_CREAT) as files:
        job.hand_over(files)
        job.mailbox().cancel_device(True)
        with refused(errno.ECANCELED):
            job.ask(READY, STRIPES, SLOT_BYTES)
    job.is_settled(offloaded=False)
    job.offload()
    job.come_back()


def test_a_thread_is_parked_with_a_lock_of_the_drivers(start_job: Start, node: GpuNode) -> None:
    """As if it were locked, who sleeps in the driver is parked. What waits for it must be known while it can be let go."""
    job = start_job("grow 4", "asking")
    job.ready()
    node.fault("ask", "slow:1000", once=False)
    time.sleep(0.1)  # from now on one of those calls is under way
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


def test_files_with_too_little_room_are_known_before_anything_is_copied(start_job: Start) -> None:
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


def test_a_job_that_closes_what_is_not_its_own(start_job: Start, tmp_path: Path) -> None:
    """Its own file, which gets the number of a stripe's descriptor, is neither written nor cut nor closed."""
    job = start_job("grow 4")
    job.ready()
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    numbers = [int(link.name) for link in Path(f"/proc/{job.pid}/fd").iterdir() if "device-1" in os.readlink(link)]
    assert job.do(f"replace {numbers[0]} {theirs}") == "done"
    job.park_threads()
    with refused(errno.EBADF, "not its own"):
        job.ask(OFFLOAD)
    job.ask(DROP)
    assert theirs.read_bytes() == b"precious"
    assert os.readlink(f"/proc/{job.pid}/fd/{numbers[0]}") == str(theirs)
    job.is_unharmed()


def test_no_room_at_the_fill(start_job: Start, room: Room) -> None:
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
    """That the operation fails when it is done for the so-many-th time."""
    return [(operation, "slow:0")] * number + [(operation, "fail:CUDA_ERROR_UNKNOWN")]


@pytest.mark.parametrize("operation", ["pin", "copy"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_interrupted_on_the_way_out(start_job: Start, node: GpuNode, room: Room, operation: str, number: int) -> None:
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
def test_interrupted_on_the_way_back(
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


def test_stripes_that_cannot_be_written(start_job: Start) -> None:
    job = start_job("grow 2")
    for path in job.paths:
        path.touch()
    job.ready(os.O_RDONLY)
    job.park_threads()
    with refused(errno.EBADF, "pwrite"):
        job.ask(OFFLOAD)
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_a_stripe_that_does_not_come(start_job: Start) -> None:
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


def test_a_call_that_does_not_come_back(start_job: Start, node: GpuNode) -> None:
    """The control thread still answers."""
    job = start_job("grow 1")
    job.ready()
    job.park_threads()
    for _ in range(2):
        node.fault("copy", "slow:0")  # the rehearsal's
    node.fault("copy", "hang")
    with refused(errno.ETIMEDOUT, "did not return"):
        job.ask(OFFLOAD, timeout_s=0.5)
    assert not job.state().offloaded
    for command in (DROP, OPEN, OFFLOAD):
        with refused(errno.EBUSY):
            job.ask(command)
    job.release()
    assert job.do("list") != "", "the job's own threads go on"


def test_commands_in_a_wrong_order(start_job: Start) -> None:
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


def test_a_reset_after_it_was_made_ready(start_job: Start, room: Room) -> None:
    """Streams and pinned memory ended with the context: nobody touches them again."""
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
