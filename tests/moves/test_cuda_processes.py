"""Which processes of a rank hold CUDA: not one for which CUDA has found no GPU, although the driver says that it runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from snapshotd.cuda import library
from snapshotd.cuda.driver import Gpus
from snapshotd.cuda.states import State
from snapshotd.moves.device import cuda_processes
from snapshotd.proc.tree import Process

#: Has a file named libcuda.so.1 mapped, and what its argument says open.
PROGRAM = """
import mmap, sys
library = open(sys.argv[1], "rb")
mapped = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
opened = [open(path, "rb") for path in sys.argv[2:]]
print("ready", flush=True)
sys.stdin.read()
"""


class Driver:
    """Answers for the driver, which calls every process running in which CUDA was initialised."""

    def __init__(self, state: State) -> None:
        self.answer = state

    async def state(self, process: Process) -> State:
        return self.answer


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device with the driver's number, in place of /dev/nvidiactl."""
    path = tmp_path / "nvidiactl"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, 255))
    monkeypatch.setattr(library, "_CONTROL", str(path))
    return path


@pytest.fixture
def program(tmp_path: Path) -> Iterator[int]:
    """A process with the driver's library and no device."""
    (tmp_path / "libcuda.so.1").write_bytes(b"library")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "libcuda.so.1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


@pytest.mark.root
async def test_process_for_which_cuda_has_found_no_gpu_holds_none(control: Path, program: int) -> None:
    assert await cuda_processes.find(cast(Gpus, Driver(State.RUNNING)), [program]) == (None, [])


@pytest.mark.root
@pytest.mark.parametrize("state", [State.LOCKED, State.CHECKPOINTED])
async def test_process_that_is_checkpointed_counts_although_no_device_is_open(
    control: Path, program: int, state: State
) -> None:
    """Its descriptors are closed, and its device memory is in its host memory."""
    assert not await _holds_none(program, state)


async def test_stand_in_for_the_driver_opens_no_devices(program: int) -> None:
    assert not library.found_no_gpu(program)


@pytest.mark.root
def test_process_that_has_a_gpu_open_holds_it(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [(3, "/dev/null", 0), (4, "/dev/nvidia0", 0)]
    monkeypatch.setattr(library, "read_links", lambda _pid: iter(seen))
    assert not library.found_no_gpu(1)
    seen.pop()
    assert library.found_no_gpu(1)


async def _holds_none(pid: int, state: State) -> bool:
    try:
        found, _ = await cuda_processes.find(cast(Gpus, Driver(state)), [pid])
    except AttributeError:  # it went on to ask for the GPUs, which this driver does not know
        return False
    return found is None
