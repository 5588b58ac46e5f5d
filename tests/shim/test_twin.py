"""Tests of twins: a process that has the job's memory as it was, and of which the job notices nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.proc import comm, stat, status, tree
from snapshotd.proc.tree import Process
from tests.shim.jobs import Job, python, until

Start = Callable[..., Job]

MIB = 1 << 20
#: Fills its memory with the first character of each line, and says what it knows of children.
JOB = f"""
import ctypes, mmap, os, signal, sys, threading
signals = []
signal.signal(signal.SIGCHLD, lambda *_: signals.append(1))
memory = mmap.mmap(-1, {MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = b"a" * {MIB}
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
while line := sys.stdin.readline():
    memory[:] = line[:1].encode() * {MIB}
    try:
        found = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        found = "none"
    tasks = "/proc/self/task/"
    children = [open(tasks + task + "/children").read().split() for task in os.listdir(tasks)]
    print(found, sum(children, []), len(signals), flush=True)
"""
NONE = "none [] 0"


@pytest.fixture
def twins() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for twin in made:
        twin.signal(signal.SIGKILL)


def has(twin: Process, address: int) -> bytes:
    """All that it has there, each byte once."""
    fd = os.open(f"/proc/{twin.pid}/mem", os.O_RDONLY)
    try:
        return bytes(set(os.pread(fd, MIB, address)))
    finally:
        os.close(fd)


def is_deaf(twin: Process) -> bool:
    return status.read(twin.pid).blocks(signal.SIGTERM)


def started(start: Start) -> tuple[Job, int]:
    job = start(*python(JOB))
    address = int(job.hear())
    until(lambda: job.mailbox().serves())
    return job, address


def test_twin_keeps_the_memory_and_the_job_notices_nothing(start: Start, twins: list[Process]) -> None:
    job, address = started(start)
    for before, after in ("ab", "bc"):
        twins.append(Process.of(job.mailbox().twin(20, 600)))
        assert comm.read(twins[-1].pid) == "snapshim-twin", "also before it has run"
        job.say(after)
        assert job.hear() == NONE
        assert has(twins[-1], address) == before.encode()
    assert has(twins[0], address) == b"a"
    for twin in twins:
        assert stat.read(twin.pid).parent != job.pid
        assert os.listdir(f"/proc/{twin.pid}/fd") == []
        until(partial(is_deaf, twin))
    twins[0].signal(signal.SIGKILL)
    until(lambda: not twins[0].alive())
    job.say("d")
    assert job.hear() == NONE
    assert job.finish() == ("", "", 0), "its output ends with it, although a twin lives"
    assert has(twins[1], address) == b"b"


def test_twin_ends_by_itself(start: Start, twins: list[Process]) -> None:
    job, _ = started(start)
    twins.append(Process.of(job.mailbox().twin(20, 0.1)))
    until(lambda: not twins[0].alive())
    job.say("b")
    assert job.hear() == NONE


def test_process_that_adopts_orphans_has_no_twin(start: Start) -> None:
    """It would learn of the end of a process that it does not know."""
    job = start(*python("import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)" + JOB))
    job.hear()
    until(lambda: job.mailbox().serves())
    with pytest.raises(GpuFailed, match="adopts orphans"):
        job.mailbox().twin(20, 600)
    assert tree.children(job.pid) == []
    job.say("b")
    assert job.hear() == NONE
