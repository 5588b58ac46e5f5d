"""Tests of backed memory that processes share with CUDA IPC, through the library's own handles."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path

import pytest

from tests.descriptors import open_links
from tests.fakes.cuda_fake import GpuNode
from tests.shim.jobs import until
from tests.shim.memory.conftest import Room, Start
from tests.shim.memory.jobs import MIB, DeviceJob

#: A program's first block has the number 1; its first word is made of that number and the index 0.
FIRST_WORD = str(1 << 32)
OWN_HANDLE, GONE = "error-201", "error-205"


@pytest.fixture(params=["offload", "shared"])
def usual_library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _said(job: DeviceJob, line: str) -> str:
    """The job's answer to a line, without the final `done`."""
    return job.do(line).removesuffix("done").strip()


def _shared(job: DeviceJob) -> tuple[int, int]:
    state = job.mailbox().state()
    return state.exports, state.imports


def _servers(job: DeviceJob) -> int:
    """The number of threads that run an IPC server."""
    found = 0
    for task in Path(f"/proc/{job.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "comm").read_text() == "snapshim-ipc\n"
    return found


def _is_shut(job: DeviceJob) -> None:
    until(lambda: not _servers(job) and not job.leftovers(), "its IPC server has ended")


def test_another_process_sees_the_same_memory(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job("fill 2")
    handle = _said(owner, "share 0")
    assert len(handle) == 128
    assert _said(owner, "share 0") == handle  # a second export returns the same handle
    assert _shared(owner) == (1, 0)
    assert _said(guest, f"open {handle}").startswith("0x")
    assert _said(guest, "peek") == FIRST_WORD
    assert _shared(guest) == (0, 1)
    assert guest.do("poke 77") == "done"
    assert owner.do("check") == "1 of 1 differ"
    assert guest.do("check") == "same"


def test_handle_opened_twice_stays_mapped_until_it_is_closed_twice(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    handle = _said(owner, "share 0")
    assert _said(guest, f"open {handle}") == _said(guest, f"open {handle}")
    assert _shared(guest) == (0, 2)
    assert _said(guest, "shut") == "0"
    assert _said(guest, "peek") == FIRST_WORD
    assert _said(guest, "shut") == "0"
    assert _shared(guest) == (0, 0)
    assert _said(guest, "shut") != "0"  # CUDA's own answer: it has no such memory
    assert owner.do("check") == "same"


def test_freed_memory_is_no_longer_shared_and_ends_the_ipc_server(start_job: Start, room: Room) -> None:
    owner, guest = start_job("fill 4"), start_job()
    before = room()
    assert owner.do("fill 8") == "done"
    handles = [_said(owner, f"share {place}") for place in (0, 1)]
    assert len(set(handles)) == 2
    until(lambda: _servers(owner) == 1, "its IPC server runs")
    assert owner.do("shrink") == "done"
    assert _shared(owner) == (0, 0)
    _is_shut(owner)
    assert room() >= before
    for handle in handles:
        assert _said(guest, f"open {handle}") == GONE
    assert owner.do("fill 4") == "done"  # memory can be exported again
    assert _said(guest, f"open {_said(owner, 'share 0')}").startswith("0x")


def test_handle_is_closed_by_a_thread_without_a_context(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    assert _said(guest, f"open {_said(owner, 'share 0')}").startswith("0x")
    assert _said(guest, "shut-elsewhere") == "0"
    assert _shared(guest) == (0, 0)


def test_memory_closed_in_a_capture_is_unmapped_after_it(start_job: Start) -> None:
    owner, guest = start_job("fill 4", "fill 8"), start_job()
    handles = [_said(owner, f"share {place}") for place in (0, 1)]
    address = _said(guest, f"open {handles[0]}")
    assert guest.do("capture") == "done"
    assert _said(guest, "shut") == "0"
    assert _shared(guest) == (0, 1)  # it is still mapped, so it still counts
    assert _said(guest, f"open {handles[0]}") == address
    assert _shared(guest) == (0, 1)
    assert _said(guest, "shut") == "0"
    assert guest.do("captured") == "done"
    assert _said(guest, f"open {handles[1]}").startswith("0x")
    assert _shared(guest) == (0, 1)
    assert _said(guest, "shut") == "0"
    assert _shared(guest) == (0, 0)


@pytest.mark.parametrize("device", [0, 1])
def test_every_peer_device_can_access_opened_memory(start_job: Start, device: int) -> None:
    owner, guest = start_job("fill 4"), start_job()
    assert guest.do(f"device {device}") == "done"
    assert _said(guest, f"open {_said(owner, 'share 0')}").startswith("0x")
    assert _said(guest, "opened") == "3 3"


def test_handles_are_valid_while_others_are_exported_and_freed(start_job: Start) -> None:
    """Freeing the last block ends the IPC server at the moment when the next block is exported."""
    owner, guest = start_job("trade"), start_job()
    for _ in range(60):
        assert owner.do("fill 4") == "done"
        assert _said(guest, f"open {_said(owner, 'share 0')}").startswith("0x")
        assert _said(guest, "shut") == "0"
        assert owner.do("shrink") == "done"
    assert owner.do("stop") == "done"
    assert owner.do("shrink") == "done"
    assert _shared(owner) == (0, 0)
    _is_shut(owner)


def test_a_silent_client_of_the_ipc_server_delays_no_other(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    handle = _said(owner, "share 0")
    (server,) = struct.unpack_from("<Q", bytes.fromhex(handle), 16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0snapshim-{server:016x}")
        assert _said(guest, f"open {handle}").startswith("0x")
        assert owner.do("shrink") == "done"
        _is_shut(owner)


def test_files_that_replace_the_ipc_servers_descriptors_stay_open(start_job: Start, tmp_path: Path) -> None:
    owner = start_job("fill 4")
    handle = _said(owner, "share 0")
    ours = [number for number, target in open_links(owner.pid).items() if "socket" in target or "zero" in target]
    assert len(ours) == 2
    for number in ours:
        own = tmp_path / f"own-{number}"
        own.touch()
        assert owner.do(f"replace {number} {own}") == "done"
    assert _said(start_job(), f"open {handle}") == GONE
    assert owner.do("shrink") == "done"
    for number in ours:  # the job's files are still open
        assert os.readlink(f"/proc/{owner.pid}/fd/{number}") == str(tmp_path / f"own-{number}")


def test_process_cannot_open_its_own_handle(start_job: Start) -> None:
    owner = start_job("fill 4")
    assert _said(owner, f"open {_said(owner, 'share 0')}") == OWN_HANDLE


def test_handle_of_an_ended_process_cannot_be_opened(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    handle = _said(owner, "share 0")
    os.kill(owner.pid, signal.SIGKILL)
    owner.popen.wait()
    assert _said(guest, f"open {handle}") == GONE
    assert _shared(guest) == (0, 0)


def test_memory_that_cannot_be_mapped_leaves_nothing_behind(start_job: Start, node: GpuNode) -> None:
    owner, guest = start_job("fill 4"), start_job()
    handle = _said(owner, "share 0")
    before = guest.do("room")
    node.fault("map", "fail:CUDA_ERROR_UNKNOWN", pid=guest.pid)
    assert _said(guest, f"open {handle}") == "error-999"
    assert _shared(guest) == (0, 0)
    assert guest.do("room") == before
    assert not [link for link in open_links(guest.pid).values() if "zero" in link]
    assert _said(guest, f"open {handle}").startswith("0x")  # it can be retried
    assert _said(guest, "peek") == FIRST_WORD


def test_a_child_has_neither_the_memory_nor_the_ipc_server(start_job: Start) -> None:
    owner, guest = start_job("fill 4"), start_job()
    handle = _said(owner, "share 0")
    child = int(owner.do("fork").split()[0])
    try:
        until(lambda: len(os.listdir(f"/proc/{child}/task")) > 1, "it has begun")
        assert not [link for link in open_links(child).values() if "socket" in link or "zero" in link]
        os.kill(owner.pid, signal.SIGKILL)
        owner.popen.wait()
        assert _said(guest, f"open {handle}") == GONE  # at once: the child does not keep the server's socket open
    finally:
        os.kill(child, signal.SIGKILL)


def test_shared_memory_is_not_offloaded(start_job: Start) -> None:
    owner, guest = start_job("fill 4", "fill 8", device_memory="offload"), start_job()
    handle = _said(owner, "share 0")
    assert owner.state().bytes == 8 * MIB
    assert owner.offload() == 8 * MIB
    assert _said(guest, f"open {handle}").startswith("0x")  # its server answers while the job's threads are parked
    assert _said(guest, "peek") == FIRST_WORD
    owner.come_back()


def test_other_users_get_nothing_from_the_ipc_server(start_job: Start) -> None:
    owner = start_job("fill 4")
    handle = bytes.fromhex(_said(owner, "share 0"))
    server, number = struct.unpack_from("<QQ", handle, 16)
    name = f"\0snapshim-{server:016x}"

    def asked(message: bytes) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(name)
            try:
                connection.sendall(message)
                _, files, _, _ = socket.recv_fds(connection, 8, 4)
            except (ConnectionResetError, BrokenPipeError):  # closed without an answer
                return 0
            for file in files:
                os.close(file)
            return len(files)

    assert asked(struct.pack("<Q", number)) == 1
    assert asked(struct.pack("<Q", number + 1)) == 0
    assert asked(struct.pack("<Q", 0)) == 0
    assert asked(b"x") == 0
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            os._exit(10 + asked(struct.pack("<Q", number)))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


def test_handle_of_cuda_is_passed_to_cuda(start_job: Start) -> None:
    owner, guest = start_job("fill 4", device_memory="driver"), start_job()
    assert _said(guest, f"open {_said(owner, 'share 0')}") == "error-801"  # the stand-in's own answer


def test_failed_export_prints_the_remedy_once(start_job: Start, node: GpuNode) -> None:
    job = start_job("fill 4")
    node.fault("export", "fail:CUDA_ERROR_NOT_SUPPORTED", once=False)
    assert _said(job, "share 0") == _said(job, "share 0") == "error-1"
    assert _shared(job) == (0, 0)
    _is_shut(job)
    _, errors, _ = job.finish()
    assert errors.count("migrator run --device-memory driver") == 1


@pytest.mark.parametrize("command", ["fill 4", "segments"])
def test_memory_is_backed_if_the_driver_creates_none_for_export(start_job: Start, node: GpuNode, command: str) -> None:
    job = start_job()
    node.fault("create", "fail:CUDA_ERROR_NOT_SUPPORTED")
    assert job.do("fill 4") == "done"
    assert job.do(command) == "done"
    assert job.state().bytes >= 8 * MIB
    assert _said(job, "share 0") == "error-1"
    assert job.offload() == job.state().bytes
    job.come_back()
