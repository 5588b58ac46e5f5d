"""Real processes in the role of a rank: each has one feature, reports that it is ready, and waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from snapshotd.api.snapshotd_pb2 import Check, ProcessId, Rank, RankFacts
from snapshotd.preflight import DriverReport, NcclReports, inspect_rank

CARRY_PATHS = ("/tmp", "/var/tmp", "/dev/shm")

_BEFORE = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
pids = [os.getpid()]
gate = os.pipe()
def wait():  # in a forked child: until the root ends
    os.close(gate[1]); os.read(gate[0], 1)
"""
_AFTER = """
print("ready", *pids, flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@dataclass
class Child:
    """A process whose keeper is the test: its stdin and stdout are pipes to it."""

    process: subprocess.Popen[bytes]
    pids: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def then(self, statement: str) -> None:
        """Runs one more statement in it, and waits until that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(statement.encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"done\n"

    def inspect(
        self,
        *,
        carry_paths: Sequence[str] = CARRY_PATHS,
        keeper_pid: int | None = None,
        criu_version: str = "4.2.1",
        keeper_is_guest: bool = False,
        gpu: DriverReport | None = None,
        nccl: NcclReports | None = None,
        holds: bool = False,
    ) -> tuple[RankFacts, dict[str, Check]]:
        facts, checks = inspect_rank(
            self.pids,
            self.pids[0],
            rank=Rank(uid="job-0-0a1b2c3d", job="job", process=ProcessId(pid=self.pids[0])),
            node="node-1",
            daemon_version="0.1.0",
            criu_version=criu_version,
            carry_paths=carry_paths,
            keeper_pid=os.getpid() if keeper_pid is None else keeper_pid,
            keeper_is_guest=keeper_is_guest,
            gpu=gpu,
            nccl=nccl,
            holds=holds,
        )
        named = {check.name: check for check in checks}
        assert len(named) == len(checks), "a name was used twice"
        return facts, named

    def end(self) -> None:
        """Kills the root process. The children that it forked wait for that and end too."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


Starter = Callable[..., Child]


def start(code: str, *, session: bool = True, pass_fds: Sequence[int] = ()) -> Child:
    """Starts `code`, which may add to `pids`. It skips the test by exiting with a message that begins with `skip`."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _BEFORE + code + _AFTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=session,
        pass_fds=pass_fds,
    )
    child = Child(process)
    assert process.stdout is not None
    assert process.stderr is not None
    words = process.stdout.readline().split()
    if not words:
        text = process.stderr.read().decode()
        child.end()
        if text.startswith("skip"):
            pytest.skip(text.strip())
        raise AssertionError(text)
    child.pids = [int(word) for word in words[1:]]
    return child
