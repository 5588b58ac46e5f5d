"""Tests with the real CRIU that a parked process is dumped parked, restored parked, and continues when released."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.inprocess import shimctl
from snapshotd.proc import tree
from tests.shim.jobs import REPOSITORY, STUCK_S, Work, until

CRIU = REPOSITORY / ".criu" / "criu"
LIMITS = REPOSITORY / "shim" / "lib" / "libcriulimits.so"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="CRIU needs root"),
    pytest.mark.skipif(not CRIU.exists(), reason="no CRIU of our own: run `make setup`"),
]

KINDS = ("spin", "allocate", "doze", "exchange", "turns", "churn")
#: A new pid namespace with its own /proc, as a guest keeper creates it; thread ids inside are the old ones.
FRESH = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class FileWork(Work):
    """Has files as stdio, which CRIU reopens by their names, and leads its session."""

    def __init__(self, library: Path, program: Path, folder: Path, user_id: int) -> None:
        os.mkfifo(folder / "input")
        become = f"setpriv --reuid {user_id} --regid {user_id} --clear-groups" if user_id else ""
        wait = f'exec {become} "$@" 0<>{folder}/input >{folder}/output 2>&1'
        super().__init__(library, program, folder, *KINDS, wrap=("setsid", "sh", "-c", wait, "sh"))


def _criu(verb: str, images: Path, *arguments: str, wrap: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    options = ["--images-dir", str(images), "--log-file", f"{verb}.log", "-v4", "--manage-cgroups=ignore"]
    # As the daemon starts it: root may lack the capability to read the limits of a user's process.
    environment = os.environ | dict.fromkeys(
        ("LD_PRELOAD", "SNAPSHOT_CRIU_PRELOAD"), str(LIMITS) if verb == "dump" else ""
    )
    return subprocess.Popen([*wrap, str(CRIU), verb, *options, *arguments], stdin=subprocess.DEVNULL, env=environment)


def _errors(images: Path, verb: str) -> str:
    log = images / f"{verb}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(line for line in lines if "Error" in line)


@contextlib.contextmanager
def _restored(images: Path, inner: int) -> Iterator[tree.Process]:
    """The process in its new pid namespace, with its pid in this one."""
    criu = _criu("restore", images, wrap=FRESH)
    found: list[int] = []

    def look() -> bool:
        assert criu.poll() is None, _errors(images, "restore")
        for pid in _below(criu.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if tree.inner_pid(pid) == inner and "counters" in Path(f"/proc/{pid}/maps").read_text():
                    found.append(pid)
        return bool(found) and "Restore finished successfully" in (images / "restore.log").read_text(errors="replace")

    try:
        until(look)
        yield tree.Process.of(found[-1])
    finally:
        criu.send_signal(signal.SIGKILL)
        criu.wait(STUCK_S)


def _below(pid: int) -> list[int]:
    return [found for child in tree.children(pid) for found in [child, *_below(child)]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("user_id", [0, 1500])
def test_a_parked_process_is_restored_parked(library: Path, work_program: Path, folder: Path, user_id: int) -> None:
    """That of a user is dumpable when it is restored: otherwise nothing would be written into its mailbox."""
    library, program = (Path(shutil.copy(file, folder)) for file in (library, work_program))
    (folder / "counters").touch()
    os.chown(folder / "counters", user_id, user_id)
    job = FileWork(library, program, folder, user_id)
    try:
        job.moves()
        box = job.mailbox()
        box.park(20)
        threads = box.state().threads
        frozen = job.counters()
        images = folder / "images"
        images.mkdir()
        dump = _criu("dump", images, "--tree", str(job.pid))
        assert dump.wait(STUCK_S) == 0, _errors(images, "dump")
        assert job.popen.wait(STUCK_S) == -signal.SIGKILL
        with _restored(images, job.pid) as process:
            job.stands_still()
            assert job.counters() == frozen
            restored = shimctl.find(process)
            assert restored is not None
            assert process.pid != job.pid
            assert restored.user_id == user_id
            assert restored.state() == shimctl.ShimState(parked=True, threads=threads, managed=0, exports=0, imports=0)
            assert shimctl.problems(process.pid) == []
            restored.park(10)
            restored.release(10)
            job.moves()
            restored.park(20)  # it can be dumped again
            job.stands_still()
            restored.release(10)
            job.moves()
    finally:
        job.end()
