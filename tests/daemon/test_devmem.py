"""The daemon's side of device memory with a real process: requests from before a restart, and failures."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess import devmem
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.shimctl import Mailbox
from snapshotd.proc.tree import Process
from tests.shim import conftest as shim
from tests.shim.memory import conftest as memory
from tests.shim.memory.conftest import Start
from tests.shim.memory.jobs import DROP, FILL, OFFLOAD

library, offload_library, shared_library = shim.library, shim.offload_library, shim.shared_library
node, program, libraries = memory.node, memory.program, memory.libraries
usual_library, start_job = memory.usual_library, memory.start_job


@pytest.mark.parametrize("command", [OFFLOAD, FILL, DROP])
def test_request_that_was_never_signalled_is_cancelled(
    start_job: Start, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The daemon was killed between writing the request and sending the signal."""
    job = start_job("grow 4")
    if command == FILL:
        job.offload()
    else:
        job.ready()
        job.park_threads()
    with monkeypatch.context() as killed:
        killed.setattr(Mailbox, "_wake", lambda mailbox, thread: None)
        job.mailbox().post(command, 60.0)
    found = devmem.find(job.process)
    assert found is not None
    assert job.state().busy
    found.cancel()
    assert (job.state().busy, found.offloaded()) == (False, command == FILL)
    job.come_back()
    job.release()


def test_descriptor_that_is_not_a_socket_is_closed(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="socket"):
        devmem._descriptor(Process.of(os.getpid()), file)
    assert os.listdir("/proc/self/fd") == before
    os.close(file)


def test_process_that_does_not_receive_descriptors_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devmem, "_OPEN_S", 0.01)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        with contextlib.suppress(BlockingIOError):
            while ours.send(bytes(1 << 16)):
                pass
        ours.setblocking(True)
        mailbox: Any = SimpleNamespace(process=Process.of(os.getpid()))
        with pytest.raises(GpuFailed, match="cannot be given the files"):
            devmem.ShimMemory(mailbox)._hand_over(ours.fileno(), [0])
