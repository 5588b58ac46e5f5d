"""The check `file-locks`: what the rank itself has locked counts, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight import process_checks, recheck, refusals
from tests.preflight.conftest import Starter

TAKE_LOCK = {
    "POSIX": "fcntl.lockf(f, fcntl.LOCK_EX)",
    "FLOCK": "fcntl.flock(f, fcntl.LOCK_EX)",
    "OFDLCK": "fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))",  # 37: F_OFD_SETLK
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_checks, "LOCK_WAIT_S", 0.0)


def test_lock_on_a_file_that_is_not_moved_is_refused(rank: Starter, tmp_path: Path) -> None:
    child = rank(f"import fcntl; f = open('{tmp_path}/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    assert child.inspect(carry_paths=[])[1]["file-locks"].verdict == Check.REFUSE
    assert child.inspect(carry_paths=[str(tmp_path)])[1]["file-locks"].reason == "1 locks"


@pytest.mark.parametrize("kind", TAKE_LOCK)
def test_lock_of_a_stranger_on_a_file_that_the_rank_has_open_is_not_the_rank_s(
    rank: Starter, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "shared"
    path.touch()
    child = rank(f"f = open('{path}', 'r+')")
    stranger = rank(f"import fcntl, struct; f = open('{path}', 'r+'); {TAKE_LOCK[kind]}")
    check = child.inspect(carry_paths=[])[1]["file-locks"]
    assert (check.verdict, check.reason) == (Check.PASS, "none")
    check = stranger.inspect(carry_paths=[])[1]["file-locks"]
    assert check.verdict == Check.REFUSE
    assert f"{kind} on " in check.reason
    assert str(path) in check.reason


def test_flock_that_a_child_took_and_left_behind_is_the_rank_s(rank: Starter, tmp_path: Path) -> None:
    """As after `flock 9` in a shell: /proc/locks does not show it any more, because the process that took it has ended."""
    child = rank(
        f"import fcntl; f = open('{tmp_path}/lock', 'w')\n"
        "if os.fork() == 0: fcntl.flock(f, fcntl.LOCK_EX); os._exit(0)\nos.wait()"
    )
    assert "FLOCK on " in child.inspect(carry_paths=[])[1]["file-locks"].reason


def test_flock_whose_descriptor_was_closed_while_its_file_is_mapped_is_the_rank_s(
    rank: Starter, tmp_path: Path
) -> None:
    (tmp_path / "lock").write_bytes(bytes(4096))
    child = rank(
        f"import fcntl, mmap; f = os.open('{tmp_path}/lock', os.O_RDWR); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "address = libc.mmap(None, 4096, 1, mmap.MAP_SHARED, f, 0); os.close(f)"
    )
    assert child.inspect(carry_paths=[])[1]["file-locks"].verdict == Check.REFUSE


def test_request_that_waits_for_a_lock_is_not_a_lock(rank: Starter, tmp_path: Path) -> None:
    rank(f"import fcntl; f = open('{tmp_path}/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    child = rank(
        f"import fcntl; f = open('{tmp_path}/lock', 'w'); child = os.fork()\n"
        "if child == 0: fcntl.flock(f, fcntl.LOCK_EX)\npids.append(child)"
    )
    waits = f"-> FLOCK  ADVISORY  WRITE {child.pids[1]} "
    while waits not in Path("/proc/locks").read_text():
        assert Path(f"/proc/{child.pids[1]}").exists()
    try:
        assert child.inspect(carry_paths=[])[1]["file-locks"].reason == "none"
    finally:
        os.kill(child.pids[1], signal.SIGKILL)


def test_lock_that_is_held_for_a_moment_is_waited_for(
    rank: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compilers' and downloads' caches hold them. It is released when preflight has seen it."""
    child = rank(f"import fcntl; f = open('{tmp_path}/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    waited = []

    def release(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            child.then("fcntl.flock(f, fcntl.LOCK_UN)")

    monkeypatch.setattr(process_checks, "LOCK_WAIT_S", 600.0)
    monkeypatch.setattr("snapshotd.preflight.process_checks.time.sleep", release)
    assert child.inspect(carry_paths=[])[1]["file-locks"].reason == "none"
    assert len(waited) == 3


SHARE_LOCK = {
    "POSIX": "fcntl.lockf(f, fcntl.LOCK_SH)",
    "FLOCK": "fcntl.flock(f, fcntl.LOCK_SH)",
    "OFDLCK": "fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))",
}


@pytest.mark.parametrize("kind", SHARE_LOCK)
def test_shared_lock_on_a_file_that_both_nodes_share_is_moved(rank: Starter, tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    child = rank(f"import fcntl, struct; f = open('{tmp_path}/data', 'r+'); {SHARE_LOCK[kind]}")
    check = child.inspect(carry_paths=[])[1]["file-locks"]
    assert (check.verdict, check.reason) == (Check.PASS, "1 locks")


def test_exclusive_lock_beside_a_shared_one_on_the_same_file_is_refused(rank: Starter, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    child = rank(
        f"import fcntl; f = open('{tmp_path}/data', 'r+'); fcntl.lockf(f, fcntl.LOCK_SH, 10, 0)\n"
        "fcntl.lockf(f, fcntl.LOCK_EX, 10, 50)"
    )
    check = child.inspect(carry_paths=[])[1]["file-locks"]
    assert check.verdict == Check.REFUSE
    assert f"POSIX on python (pid {child.pid}) fd " in check.reason
    assert f"{tmp_path}/data" in check.reason


def test_lease_on_a_file_that_both_nodes_share_is_refused(rank: Starter, tmp_path: Path) -> None:
    """As shared as it is: the open descriptor of the other copy would break it."""
    (tmp_path / "data").touch()
    child = rank(f"import fcntl; f = open('{tmp_path}/data'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK)")
    assert "LEASE on " in child.inspect(carry_paths=[])[1]["file-locks"].reason


def test_frozen_rank_is_not_waited_for(rank: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = rank()
    facts, _ = child.inspect(carry_paths=[])
    child.then(f"import fcntl; f = open('{tmp_path}/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    monkeypatch.setattr(process_checks, "LOCK_WAIT_S", 600.0)  # the test would hang
    found = recheck(child.pids, facts, carry_paths=[], keeper_pid=os.getpid())
    assert [check.name for check in refusals(found.checks)] == ["file-locks"]
