from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapshotd.proc import status, syscall

#: The new process opens a FIFO that no process writes to: until then posix_spawn does not return.
SPAWNS = """
import os, sys
opens = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens), 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the system call of another process cannot be read without root")
def test_thread_that_waits_for_the_program_of_a_new_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", SPAWNS, fifo]) as spawning:
        try:
            deadline = time.monotonic() + 60
            while not syscall.starts_a_process(spawning.pid, spawning.pid):
                assert spawning.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert status.read(spawning.pid, spawning.pid).blocks(61)
            fifo.write_text("")
            assert spawning.wait(60) == 0
        finally:
            spawning.kill()
    assert not syscall.starts_a_process(spawning.pid, spawning.pid)


def test_thread_that_waits_for_something_else() -> None:
    with subprocess.Popen(["sleep", "1000"]) as sleeping:
        assert not syscall.starts_a_process(sleeping.pid, sleeping.pid)
        sleeping.kill()
