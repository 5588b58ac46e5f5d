"""Device memory that the library backs: out into stripes and back, to the byte, whatever goes wrong in between."""

from __future__ import annotations

import array
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import until
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DROP, FILL, MIB, OPEN, PARK, READY, SLOT_BYTES, STRIPES, DeviceJob, Refused

Room = Callable[[], int]
GRAIN = 2 * MIB


def _concatenation(job: DeviceJob) -> bytes:
    """What the stripes hold, chunk after chunk."""
    stripes = [path.read_bytes() for path in job.paths]
    blocks = [-(-size // GRAIN) * GRAIN for _, size, _ in BLOCKS[job.pid]]
    at = [0] * STRIPES
    whole = bytearray()
    turn = 0
    for size in blocks:
        for start in range(0, size, SLOT_BYTES):
            stripe = turn % STRIPES
            length = min(SLOT_BYTES, size - start)
            whole += stripes[stripe][at[stripe] : at[stripe] + length]
            at[stripe] += length
            turn += 1
    assert at == [len(stripe) for stripe in stripes]
    return bytes(whole)


#: Of each job, the blocks that are ours, noted while it could be asked.
BLOCKS: dict[int, list[tuple[int, int, int]]] = {}


def _note_blocks(job: DeviceJob) -> None:
    BLOCKS[job.pid] = [block for block in job.blocks() if block[1] >= MIB]


def test_content_leaves_and_comes_back(start_job: Start, room: Room) -> None:
    before = room()
    job = start_job("grow 4")
    _note_blocks(job)
    backed = sum(-(-size // GRAIN) * GRAIN for _, size, _ in BLOCKS[job.pid])
    assert (job.state().bytes, job.state().blocks) == (backed, len(BLOCKS[job.pid]))
    taken = before - room()
    assert job.ready() == backed
    job.park_threads()
    assert job.ask(PARK)[0] == backed
    assert job.state().parked and sum(job.state().done) == backed
    assert job.leftovers() == []
    assert before - room() == taken - backed
    whole, at = _concatenation(job), 0
    for _, size, number in BLOCKS[job.pid]:
        words = array.array("Q", range(number << 32, (number << 32) + size // 8))
        assert whole[at : at + len(words) * 8] == words.tobytes()
        at += -(-size // GRAIN) * GRAIN
    assert job.fill() == backed
    assert not job.state().parked and sum(job.state().done) == backed
    assert job.leftovers() == []
    assert before - room() == taken
    job.let_go()
    assert job.do("check") == "same"
    assert job.do("grow 2") == "done"
    assert job.park() > backed
    job.come_back()
    assert job.do("check") == "same"
    assert job.do("shrink") == "done"
    assert (job.state().bytes, job.state().blocks) == (0, 0)


def test_nothing_to_park(start_job: Start) -> None:
    job = start_job()
    assert job.park() == 0
    assert job.state().parked
    assert job.fill() == 0
    job.let_go()


def test_blocks_that_come_after_ready_are_parked_too(start_job: Start) -> None:
    job = start_job()
    assert job.ready() == 0
    assert job.do("grow 1") == "done"
    job.park_threads()
    assert job.ask(PARK)[0] == job.state().bytes > 0
    job.come_back()
    assert job.do("check") == "same"


def test_who_does_not_ask_gets_the_drivers_memory(start_job: Start) -> None:
    job = start_job("grow 1", "segments", device_memory="driver")
    assert (job.state().bytes, job.state().blocks) == (0, 0)
    assert job.do("check") == "same"


def test_no_thread_runs_while_the_memory_is_away(start_job: Start) -> None:
    job = start_job("grow 1")
    job.park()
    with pytest.raises(GpuFailed, match="device memory is parked"):
        job.let_go()
    job.come_back()
    assert job.do("check") == "same"


def test_threads_must_be_parked(start_job: Start) -> None:
    job = start_job("grow 1")
    job.ready()
    with pytest.raises(Refused) as refused:
        job.ask(PARK)
    assert refused.value.status == errno.EBUSY
    job.park_threads()
    job.ask(PARK)
    job.come_back()


def test_a_thread_that_is_caught_allocating(start_job: Start, node: GpuNode) -> None:
    job = start_job("grow 1")
    job.ready()
    node.fault("create", "slow:60000")
    assert job.do("later") == "done"
    until(lambda: not node.faults())
    job.park_threads()
    with pytest.raises(Refused) as refused:
        job.ask(PARK)
    assert refused.value.status == errno.EAGAIN
    job.let_go()
    assert job.do("wait") == "done"
    job.park_threads()
    assert job.ask(PARK)[0] == job.state().bytes
    job.come_back()
    assert job.do("check") == "same"


def test_threads_that_come_and_go(start_job: Start) -> None:
    job = start_job("grow 1", "come")
    parked = 0
    for _ in range(20):
        job.ready()
        job.park_threads()
        try:
            job.ask(PARK)
            parked += 1
        except Refused as refused:
            assert refused.status == errno.EAGAIN, refused
        job.come_back()
    assert job.do("stop") == "done"
    assert job.do("check") == "same"
    job.park()
    job.come_back()
    assert job.do("check") == "same"


def test_cancelled_before_it_began_and_on_the_way(start_job: Start, node: GpuNode) -> None:
    job = start_job("grow 4")
    job.ready()
    job.park_threads()
    job.mailbox().cancel_device(True)
    with pytest.raises(Refused) as refused:
        job.ask(PARK)
    assert refused.value.status == errno.ECANCELED
    assert not job.state().parked and job.leftovers() == []

    job.ready()
    node.fault("copy", "slow:500", once=False)
    caught: list[int] = []

    def ask() -> None:
        try:
            job.ask(PARK)
        except Refused as refused:
            caught.append(refused.status)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: any(job.state().done))
    job.mailbox().cancel_device(True)
    thread.join()
    assert caught == [errno.ECANCELED]
    node.clear_faults()
    assert not job.state().parked and job.leftovers() == []
    job.let_go()
    assert job.do("check") == "same"


def test_no_room_at_the_fill(start_job: Start, room: Room) -> None:
    job = start_job("grow 2")
    job.park()
    other = start_job(f"fill {room() // MIB - 12}")
    left = room()
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            job.fill()
        assert refused.value.status == errno.ENOMEM
        assert job.state().parked and job.leftovers() == []
        assert room() == left
    other.end()
    job.come_back()
    assert job.do("check") == "same"


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
    with pytest.raises(Refused) as refused:
        job.park()
    assert refused.value.status == errno.EIO and "999" in refused.value.words
    assert node.faults() == []
    assert not job.state().parked and job.leftovers() == [] and room() == left
    job.let_go()
    assert job.do("check") == "same"
    job.park()
    job.come_back()
    assert job.do("check") == "same"


@pytest.mark.parametrize(
    ("operation", "numbers"), [("pin", (0, 4)), ("create", (0, 3)), ("map", (0, 7)), ("copy", (0, 9))]
)
def test_interrupted_on_the_way_back(
    start_job: Start, node: GpuNode, room: Room, operation: str, numbers: tuple[int, ...]
) -> None:
    job = start_job("grow 2", "segments")
    job.park()
    left = room()
    for number in numbers:
        for line in _lines(operation, number):
            node.fault(*line)
        with pytest.raises(Refused) as refused:
            job.fill()
        assert refused.value.status == errno.EIO and "999" in refused.value.words
        assert node.faults() == []
        assert job.state().parked and job.leftovers() == [] and room() == left
    job.come_back()
    assert job.do("check") == "same"


def test_stripes_that_cannot_be_written(start_job: Start) -> None:
    job = start_job("grow 2")
    for path in job.paths:
        path.touch()
    job.ready(os.O_RDONLY)
    job.park_threads()
    with pytest.raises(Refused) as refused:
        job.ask(PARK)
    assert refused.value.status == errno.EBADF and "pwrite" in refused.value.words
    assert not job.state().parked and job.leftovers() == []
    job.let_go()
    assert job.do("check") == "same"


def test_fill_follows_stripes_that_grow(start_job: Start) -> None:
    job = start_job("grow 3")
    job.park()
    contents = [path.read_bytes() for path in job.paths]
    for path in job.paths:
        path.write_bytes(b"")
    job.ready(os.O_RDONLY)
    thread = threading.Thread(target=job.ask, args=(FILL,))
    thread.start()
    for at in range(0, max(map(len, contents)), 300_000):
        for path, content in zip(job.paths, contents, strict=True):
            with path.open("ab") as file:
                file.write(content[at : at + 300_000])
    thread.join()
    job.let_go()
    assert job.do("check") == "same"


def test_a_stripe_that_does_not_come(start_job: Start) -> None:
    job = start_job("grow 2")
    job.park()
    last = job.paths[-1].read_bytes()
    os.truncate(job.paths[-1], len(last) - 1)
    with pytest.raises(Refused) as refused:
        job.fill(timeout_s=0.3)
    assert refused.value.status == errno.ETIMEDOUT and "stripe 2" in refused.value.words
    assert job.state().parked and job.leftovers() == []

    caught: list[int] = []

    def ask() -> None:
        try:
            job.ask(FILL)
        except Refused as refused:
            caught.append(refused.status)

    job.ready(os.O_RDONLY)
    thread = threading.Thread(target=ask)
    thread.start()
    job.mailbox().cancel_device(True)
    thread.join()
    assert caught == [errno.ECANCELED] and job.state().parked

    job.paths[-1].write_bytes(last)
    job.come_back()
    assert job.do("check") == "same"


def test_a_call_that_does_not_come_back(start_job: Start, node: GpuNode) -> None:
    """The control thread still answers."""
    job = start_job("grow 1")
    job.ready()
    job.park_threads()
    node.fault("copy", "hang")
    with pytest.raises(Refused) as refused:
        job.ask(PARK, timeout_s=0.2)
    assert refused.value.status == errno.ETIMEDOUT and "come back" in refused.value.words
    assert not job.state().parked
    for command in (DROP, OPEN, PARK):
        with pytest.raises(Refused) as refused:
            job.ask(command)
        assert refused.value.status == errno.EBUSY
    job.let_go()
    assert job.do("list") != "", "the job's own threads go on"


def test_commands_in_a_wrong_order(start_job: Start) -> None:
    job = start_job("grow 1")
    for command, arguments in ((PARK, ()), (FILL, ()), (READY, (STRIPES, SLOT_BYTES))):
        with pytest.raises(Refused) as refused:
            job.ask(command, *arguments)
        assert refused.value.status == errno.EINVAL
    job.ask(DROP)
    job.ask(DROP)
    with job.files(os.O_RDWR | os.O_CREAT) as files:
        for arguments in ((0, SLOT_BYTES), (17, SLOT_BYTES), (STRIPES, 100), (STRIPES, 0)):
            job.hand_over(files)
            with pytest.raises(Refused) as refused:
                job.ask(READY, *arguments)
            assert refused.value.status == errno.EINVAL
        job.hand_over(files[:2])
        with pytest.raises(Refused) as refused:
            job.ask(READY, STRIPES, SLOT_BYTES, timeout_s=0.05)
        assert refused.value.status == errno.ETIMEDOUT and "2 of 3" in refused.value.words
    job.ready()
    assert len(job.leftovers()) > 0
    job.ask(DROP)
    assert job.leftovers() == []
    job.park()
    with pytest.raises(Refused) as refused:
        job.ready(os.O_RDONLY, slot_bytes=2 * SLOT_BYTES)
    assert refused.value.status == errno.EINVAL and str(SLOT_BYTES) in refused.value.words
    job.ready(os.O_RDONLY)
    with pytest.raises(Refused) as refused:
        job.ask(PARK)
    assert refused.value.status == errno.EALREADY
    job.come_back()
    assert job.do("check") == "same"


def test_segments_are_parked(start_job: Start, room: Room) -> None:
    before = room()
    job = start_job("segments")
    taken = before - room()
    assert (job.state().bytes, job.state().blocks) == (32 * MIB, 8)
    for _ in range(2):
        job.park()
        assert before - room() == taken - 32 * MIB
        job.come_back()
        assert before - room() == taken
        assert job.do("check") == "same"
    assert job.do("lose 0") == "done"
    assert (job.state().bytes, job.state().blocks) == (16 * MIB, 4)
    job.park()
    job.come_back()
    assert job.do("check") == "same"
    assert job.do("lose 4") == "done"
    assert job.state().blocks == 0 and before - room() == taken - 32 * MIB


def test_segments_whose_handles_were_released(start_job: Start, room: Room) -> None:
    """The mapping alone keeps them, before and after."""
    before = room()
    job = start_job("segments", "release 8")
    taken = before - room()
    job.park()
    assert before - room() == taken - 32 * MIB
    job.come_back()
    assert before - room() == taken
    assert job.do("check") == "same"


def test_a_segment_that_others_know_stays_with_the_driver(start_job: Start) -> None:
    job = start_job("segments", "retain")
    assert job.state().blocks == 7
    assert job.park() == 28 * MIB
    job.come_back()
    assert job.do("check") == "same"


def test_errors_are_cudas_own(start_job: Start) -> None:
    assert start_job().do("errors") == start_job(device_memory="driver").do("errors")


def test_peers_may_use_it(start_job: Start) -> None:
    job = start_job()
    assert job.do("peers") == "3 3 3 3"
    job.park()
    job.come_back()
    assert job.do("check") == "same"
    assert job.do("access") == "3 3 3 3"
    assert job.do("alone") == "done"
    assert job.do("access") == "0 3 0 3"


def test_a_reset_frees_it(start_job: Start, room: Room) -> None:
    before = room()
    job = start_job("grow 2", "reset")
    assert job.state().blocks == 0
    assert room() == before
    assert job.do("grow 1") == "done"
    assert job.state().blocks > 0


def test_sharing_between_processes_is_explained_once(start_job: Start) -> None:
    job = start_job("grow 1")
    assert job.do("share") == job.do("share")
    _, errors, _ = job.finish()
    assert errors.count("migrator run --device-memory driver") == 1


def test_a_forked_child_has_none(start_job: Start) -> None:
    job = start_job("grow 1")
    job.ready()
    child = int(job.do("fork").split()[0])
    try:
        until(lambda: len(os.listdir(f"/proc/{child}/task")) > 1, "it has begun")
        links = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert not [link for link in links if str(job.folder) in link]
        with Path(f"/proc/{child}/mem").open("rb") as memory:
            memory.seek(job.mailbox().address + 912)
            assert memory.read(24) == bytes(24)
    finally:
        os.kill(child, 9)
    job.park_threads()
    job.ask(PARK)
    job.come_back()
    assert job.do("check") == "same"
