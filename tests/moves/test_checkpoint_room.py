"""Host memory for the driver's checkpoint: reserved where it is charged, and counted once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Full, RankGone, Where
from snapshotd.moves.device import checkpoint_room
from snapshotd.proc.room import Room
from snapshotd.proc.tree import Process

MIB = 1 << 20
MOVE = "m-0123456789ab"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Any]:
    """A node whose daemon may use hardly any memory itself."""
    room = Room(tmp_path / "memory", "a")
    room._own.tightest = lambda: ("cgroup /daemon", MIB)  # type: ignore[method-assign]
    yield SimpleNamespace(room=room)
    room.close()


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """It takes 64 MiB when it is told to."""
    program = (
        "import sys\n"
        "sys.stdin.read(1)\n"
        "keep = bytearray(b'x') * (64 << 20)\n"
        "print('taken', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def reserve(node: Any, pid: int, size_bytes: int) -> None:
    checkpoint_room.reserve(node, MOVE, pid, size_bytes, "because", Where.SOURCE_RUNNING)


def test_limit_of_the_daemon_is_not_that_of_the_job(node: Any, job: subprocess.Popen[bytes]) -> None:
    reserve(node, job.pid, 64 * MIB)
    assert node.room.free().reserved_bytes == 64 * MIB


def test_limit_of_the_job_counts(node: Any, job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_room, "memory_room", lambda pid: [("cgroup /job", 10 * MIB)])
    with pytest.raises(Full, match=r"because the driver's checkpoint needs 64 MiB .* where cgroup /job leaves 10 MiB"):
        reserve(node, job.pid, 64 * MIB)
    assert node.room.free().reserved_bytes == 0


def test_what_the_checkpoint_has_taken_does_not_count_twice(node: Any, job: subprocess.Popen[bytes]) -> None:
    assert job.stdin is not None
    assert job.stdout is not None
    reserve(node, job.pid, 80 * MIB)
    checkpoint_room.begins(node, MOVE, [Process.of(job.pid)])
    job.stdin.write(b"\n")
    job.stdin.flush()
    assert job.stdout.readline() == b"taken\n"
    assert node.room.free().reserved_bytes <= 17 * MIB
    checkpoint_room.give_up(node, MOVE)
    assert node.room.free().reserved_bytes == 0


def test_process_that_has_ended_is_no_error(node: Any, job: subprocess.Popen[bytes]) -> None:
    reserve(node, job.pid, MIB)
    checkpoint_room.begins(node, MOVE, [Process.of(job.pid)])
    job.kill()
    job.wait()
    assert node.room.free().reserved_bytes == MIB
    with pytest.raises(RankGone, match="has ended"):
        reserve(node, job.pid, MIB)
