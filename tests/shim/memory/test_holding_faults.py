"""Whatever fails while device memory is handed over, taken back or made the job's own: no content is lost or mixed up."""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapshotd.api.errors import GpuFailed, SnapshotError, Timeout
from snapshotd.inprocess import devmem
from snapshotd.inprocess import holding as inprocess_holding
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.holding import _BLOCK, BATCH, HeldBlock
from tests.descriptors import open_links
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import STUCK_S, until
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import SLOT_BYTES, STRIPES, DeviceJob, refused
from tests.shim.memory.test_holding import Held, hand_over, held, holding, own, take_back

__all__ = ["held"]


def sockets(job: DeviceJob) -> list[int]:
    return [number for number, link in open_links(job.pid).items() if "socket" in link]


def test_memory_is_not_released_before_it_is_kept(start_job: Start, held: Held) -> None:
    """The holder ends in the middle."""
    job = start_job(*["grow 4"] * 2)
    assert job.state().blocks > BATCH

    def keep(blocks: Sequence[HeldBlock], fds: Sequence[int]) -> None:
        if held.blocks:
            raise GpuFailed("the process that keeps device memory on this node does not answer")
        held.keep(blocks, fds)

    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    job.park_threads()
    with pytest.raises(GpuFailed, match="that keeps device memory"):
        one.hand_over(STUCK_S, keep)
    job.is_settled(offloaded=False)
    held.close()
    held.fds.clear()
    job.is_unharmed()


def test_memory_is_not_released_if_the_daemon_dies_before_it_confirms(start_job: Start) -> None:
    job = start_job("grow 2")
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    assert len(sockets(job)) == 1, "only the daemon has the other one"
    job.park_threads()
    with job.under_way(Command.MEMORY_HAND_OVER) as answers:
        assert one._line is not None
        records = b""
        while not records.endswith(bytes(_BLOCK.size)):  # the last one
            blob, fds, _, _ = socket.recv_fds(one._line, 4096, BATCH)
            assert blob
            records += blob
            for fd in fds:
                os.close(fd)
        one.close()  # as if it had died
    assert answers == [errno.ECONNRESET]
    job.is_settled(offloaded=False)
    job.is_unharmed()


def test_interrupted_take_back_can_be_repeated(start_job: Start, node: GpuNode, held: Held) -> None:
    """A call hangs in the middle, and returns after the deadline: what it has mapped must not shift the other blocks."""
    job = start_job("grow 4")
    hand_over(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "slow:0")
    node.fault("map", "hold", once=False)
    with pytest.raises(Timeout):
        one.take_back(1.0, held.batches(), len(held.fds))
    node.clear_faults()
    until(lambda: _takes_back(job, held))
    job.is_settled(offloaded=False)
    job.is_unharmed()


def _takes_back(job: DeviceJob, held: Held) -> bool:
    try:
        take_back(job, held)
    except GpuFailed as error:
        if "has not returned" not in error.message:
            raise
        return False
    return True


def test_descriptors_find_their_blocks_in_any_order(start_job: Start, held: Held) -> None:
    job = start_job(*["grow 4"] * 2)
    hand_over(job, held)
    pairs = list(zip(held.blocks, held.fds, strict=True))
    random.Random(7).shuffle(pairs)
    held.blocks, held.fds = [block for block, _ in pairs], [fd for _, fd in pairs]
    take_back(job, held)
    job.is_unharmed()


def test_descriptor_of_another_block_is_refused(start_job: Start, held: Held) -> None:
    job = start_job("grow 3")
    hand_over(job, held)
    right = held.blocks
    held.blocks = [*right[:-1], right[0]]
    with pytest.raises(GpuFailed, match="an address that lacks no memory of that size"):
        take_back(job, held)
    job.is_settled(offloaded=True)
    held.blocks = right
    take_back(job, held)
    job.is_unharmed()


def test_too_many_open_files_are_reported_at_once(start_job: Start, held: Held) -> None:
    """The kernel drops descriptors that a process cannot open."""
    job = start_job("grow 4")
    hand_over(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    before = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir(f"/proc/{job.pid}/fd"))
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (highest + 2, before[1]))
    began = time.monotonic()
    with pytest.raises(GpuFailed, match=f"recvmsg fails with errno {errno.EMFILE}"):
        one.take_back(STUCK_S, held.batches(), len(held.fds))
    assert time.monotonic() - began < STUCK_S / 2
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, before)
    job.is_settled(offloaded=True)
    take_back(job, held)
    job.is_unharmed()


def test_memory_that_cannot_be_replaced_stays(start_job: Start, node: GpuNode, held: Held) -> None:
    """The driver refuses to map the job's own memory when the imported one is unmapped already."""
    job = start_job("grow 3")
    hand_over(job, held)
    take_back(job, held)
    held.close()  # nothing else keeps it
    held.fds.clear()
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "slow:0")  # where it is copied to
    node.fault("map", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match="cuMemMap or cuMemSetAccess answers 2"):
        one.own(STUCK_S)
    assert node.faults() == []
    assert one.has_imported()
    job.is_settled(offloaded=False)
    own(job)
    job.is_unharmed()


def test_memory_that_cannot_be_mapped_at_all_keeps_the_job_parked(start_job: Start, node: GpuNode, held: Held) -> None:
    job = start_job("grow 1")
    hand_over(job, held)
    take_back(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "slow:0")
    for _ in range(2):
        node.fault("map", "fail:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match="cuMemMap"):
        one.own(STUCK_S)
    job.is_settled(offloaded=True)
    with pytest.raises(SnapshotError, match="must be back on the GPU"):
        job.release()


def test_copy_that_comes_too_late_replaces_nothing(start_job: Start, node: GpuNode, held: Held) -> None:
    """The job was released meanwhile, and may have written to its memory."""
    job = start_job("grow 1")
    hand_over(job, held)
    take_back(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "hold", once=False)
    with pytest.raises(Timeout):
        one.own(1.0)
    job.release()
    node.clear_faults()
    until(lambda: _is_back(job))
    assert one.has_imported()
    assert job.do("check") == "same"


def test_job_is_not_released_while_its_memory_is_replaced(start_job: Start, node: GpuNode, held: Held) -> None:
    job = start_job("grow 1")
    hand_over(job, held)
    take_back(job, held)
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    node.fault("map", "slow:0")
    node.fault("map", "hold", once=False)
    with pytest.raises(Timeout):
        one.own(1.0)
    with pytest.raises(SnapshotError, match="is being replaced"):
        job.release()
    node.clear_faults()
    until(lambda: _is_back(job))
    job.is_unharmed()


def _is_back(job: DeviceJob) -> bool:
    """Whether no call into CUDA is under way."""
    return job.mailbox().ask(Command.MEMORY_DROP, STUCK_S).status == 0


@pytest.mark.parametrize("parked", [True, False])
def test_file_under_the_number_of_a_socket_is_left_alone(
    start_job: Start, tmp_path: Path, held: Held, parked: bool
) -> None:
    """The job has closed a descriptor that it did not open, and opened its own file under that number."""
    job = start_job("grow 2")
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    one = holding(job)
    one.ready(STRIPES, SLOT_BYTES)
    (number,) = sockets(job)
    assert job.do(f"replace {number} {theirs}") == "done"
    if parked:
        job.park_threads()
        with pytest.raises(GpuFailed, match=f"errno {errno.EBADF}"):
            one.hand_over(STUCK_S, held.keep)
    job.ask(Command.MEMORY_DROP)
    assert os.readlink(f"/proc/{job.pid}/fd/{number}") == str(theirs)
    assert theirs.read_bytes() == b"precious"
    one.close()
    if parked:
        job.is_unharmed()


def test_wrong_socket_is_not_taken(start_job: Start) -> None:
    """The daemon compares the inode: the job may have closed what was opened for the daemon."""
    job = start_job("grow 1")
    opened, inode = job.ask(Command.MEMORY_OPEN)
    with pytest.raises(OSError, match="has closed the socket"):
        devmem._descriptor(job.process, opened, inode + 1)
    devmem._descriptor(job.process, opened, inode).close()
    job.ask(Command.MEMORY_DROP)


def test_older_library_is_noticed_at_once(start_job: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not know the commands would wait for files, as long as READY may take."""
    job = start_job("grow 1")
    holding(job).must_know_how()
    monkeypatch.setattr(inprocess_holding, "Command", SimpleNamespace(MEMORY_OWN=99))
    with pytest.raises(GpuFailed, match="does not know command 99"):
        holding(job).must_know_how()


def test_command_without_ready_is_refused(start_job: Start) -> None:
    job = start_job("grow 1")
    with refused(errno.EINVAL, "MEMORY_READY comes first"):
        job.ask(Command.MEMORY_TAKE_BACK, 1)
