"""Processes that use CUDA on command, and the daemon's helper processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from snapshotd.proc.tree import Process, children
from tests.fakes.cuda_fake import GpuNode

PROGRAM = Path(__file__).with_name("program.py")


class CudaProgram:
    """A process that executes the commands of `tell`."""

    def __init__(self, node: GpuNode) -> None:
        self.child = subprocess.Popen(
            [sys.executable, PROGRAM],
            env={**os.environ, **node.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = Process.of(self.child.pid)

    def tell(self, *words: object) -> CudaProgram:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(" ".join(map(str, words)) + "\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline() == "ok\n"
        return self

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


def helpers(parent_pid: int | None = None) -> list[int]:
    """The live helper processes of this process (or of another)."""
    found = []
    for pid in children(parent_pid or os.getpid()):
        try:
            if b"snapshotd.cuda.helper" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
