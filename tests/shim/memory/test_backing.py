"""Tests of which memory is backed, and that a program sees no difference."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.descriptors import open_links
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import compile_c, until
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import DROP, FILL, MIB, OFFLOAD, OPEN, PROGRAMS, READY, refused


def test_the_library_without_offload_leaves_memory_to_the_driver(start_job: Start) -> None:
    job = start_job("grow 1", "segments", device_memory="driver")
    assert (job.state().bytes, job.state().blocks) == (0, 0)
    assert job.do("check") == "same"
    for command in (OPEN, READY, OFFLOAD, FILL, DROP):
        with refused(errno.ENOSYS, "--device-memory offload"):
            job.ask(command)


def test_expandable_segments_are_offloaded(start_job: Start, room: Room) -> None:
    before = room()
    job = start_job("segments")
    taken = before - room()
    assert (job.state().bytes, job.state().blocks) == (32 * MIB, 8)
    for _ in range(2):
        job.offload()
        assert before - room() == taken - 32 * MIB
        job.come_back()
        assert before - room() == taken
    assert job.do("lose 0") == "done"
    assert (job.state().bytes, job.state().blocks) == (16 * MIB, 4)
    job.offload()
    job.come_back()
    assert job.do("lose 4") == "done"
    assert job.state().blocks == 0
    assert before - room() == taken - 32 * MIB


def test_segments_whose_handles_were_released_are_offloaded(start_job: Start, room: Room) -> None:
    """Only the mapping keeps the physical memory, before and after."""
    before = room()
    job = start_job("segments", "release 8")
    taken = before - room()
    job.offload()
    assert before - room() == taken - 32 * MIB
    job.come_back()
    assert before - room() == taken


def test_retained_segment_is_left_to_the_driver(start_job: Start) -> None:
    job = start_job("segments", "retain")
    assert job.state().blocks == 7
    assert job.offload() == 28 * MIB
    job.come_back()


def test_block_registered_with_a_network_card_is_left_to_the_driver(start_job: Start) -> None:
    job = start_job("fill 4", "fill 6", "register")
    assert job.state().bytes == 6 * MIB
    assert job.offload() == 6 * MIB
    job.come_back()


def test_memory_of_nccl_is_not_backed(start_job: Start, tmp_path: Path) -> None:
    """NCCL shares its buffers with other processes."""
    job = start_job()
    for name, blocks in (("libother.so", 1), ("libnccl.so.2", 1)):
        library = compile_c(PROGRAMS / "library.c", tmp_path / name, "-shared", "-fPIC")
        assert job.do(f"library {library}") == "done"
        assert job.state().blocks == blocks


def test_errors_are_cudas_own(start_job: Start) -> None:
    assert start_job().do("errors") == start_job(device_memory="driver").do("errors")


def test_repeated_call_does_not_use_the_loader(start_job: Start) -> None:
    """A repeated call neither takes the loader's lock nor changes its last error."""
    assert start_job().do("loader") == "kept"


def test_peer_access_survives_offload_and_fill(start_job: Start) -> None:
    job = start_job()
    assert job.do("peers") == "3 3 3 3"
    job.offload()
    job.come_back()
    assert job.do("access") == "3 3 3 3"
    assert job.do("alone") == "done"
    assert job.do("access") == "0 3 0 3"


def test_memory_of_all_devices_is_backed(start_job: Start) -> None:
    """Each device can use the memory of the other, as copies between them need. All of it is offloaded, and comes back."""
    job = start_job("fill 4")
    assert job.do("access") == "3 0"
    assert job.do("device 1") == "done"
    assert job.do("fill 4") == "done"
    assert job.do("access") == "3 3 3 3"  # libraries that contain a runtime enable peer access unseen by the shim
    assert job.state().bytes == 8 * MIB
    assert job.do("device 0") == "done"
    assert job.do("fill 4") == "done"
    assert job.state().bytes == 12 * MIB
    assert job.offload() == 12 * MIB
    job.come_back()
    assert job.do("access") == "3 3 3 3 3 3"


def test_memory_is_backed_only_until_a_device_is_used_that_cannot_reach_the_others(
    start_job: Start, node: GpuNode
) -> None:
    """Copies between such devices need CUDA's own memory. Memory that was backed before is still offloaded."""
    node.more["no_peers"] = 1
    node.write()
    job = start_job("fill 4")
    assert job.do("device 1") == "done"
    assert job.do("fill 4") == "done"
    assert job.do("access") == "3 0 - -"
    assert job.state().bytes == 4 * MIB
    assert job.do("device 0") == "done"
    for line in ("fill 4", "segments"):
        assert job.do(line) == "done"
    assert job.state().bytes == 4 * MIB
    assert job.offload() == 4 * MIB
    job.come_back()


def test_device_reset_frees_backed_memory(start_job: Start, room: Room) -> None:
    before = room()
    job = start_job("grow 2", "reset")
    assert job.state().blocks == 0
    assert room() == before
    assert job.do("grow 1") == "done"
    assert job.state().blocks > 0


def test_forked_child_has_no_blocks_and_no_stripe_files(start_job: Start) -> None:
    job = start_job("grow 1")
    job.ready()
    child = int(job.do("fork").split()[0])
    try:
        until(lambda: len(os.listdir(f"/proc/{child}/task")) > 1, "it has begun")
        assert not [link for link in open_links(child).values() if str(job.folder) in link]
        with Path(f"/proc/{child}/mem").open("rb") as memory:
            memory.seek(job.mailbox().address + 912)
            assert memory.read(24) == bytes(24)
    finally:
        os.kill(child, 9)
    job.park_threads()
    job.ask(OFFLOAD)
    job.come_back()
