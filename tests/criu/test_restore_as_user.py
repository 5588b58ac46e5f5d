"""A real criu restores a user's process: with that user's rights, and to what was described of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.criu import session, verify
from snapshotd.moves import tree_facts
from snapshotd.moves.target import comparison
from snapshotd.moves.tree_facts import TreeFacts
from snapshotd.proc import tree
from snapshotd.runtime import programs
from tests.installation import readable_python

PREFIX = Path(__file__).resolve().parents[2] / ".criu"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not (PREFIX / "criu").exists(), reason="no CRIU of our own: run `make setup`"),
]

USER = 1500
#: Has a file, an unlinked one, a log, a FIFO, a bound socket, shared memory, an event and a child.
PROGRAM = """
import mmap, os, select, socket, sys, time
os.setsid()
file = os.open("file", os.O_RDWR)
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
gone = os.open("inside/gone", os.O_RDWR | os.O_CREAT, 0o600)
os.write(gone, b"content")
os.unlink("inside/gone")
os.mkfifo("fifo")
fifo = os.open("fifo", os.O_RDWR)
bound = socket.socket(socket.AF_UNIX)
bound.bind(os.path.abspath("socket"))
bound.listen()
client = socket.socket(socket.AF_UNIX)
client.connect(os.path.abspath("socket"))
shared = mmap.mmap(-1, 8192)
mapped = mmap.mmap(file, 4096)
poll = select.epoll()
null = os.open("/dev/null", os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
os.close(null)
if os.fork() == 0:
    while True:
        time.sleep(1000)
os.close(os.open("new", os.O_WRONLY | os.O_CREAT, 0o600))
os.rename("new", "ready")
while True:
    time.sleep(1000)
"""


class Rank:
    """A process of the user that was described and dumped, and can be restored."""

    def __init__(self, folder: Path) -> None:
        self.own, self.images = folder / "own", folder / "images"
        (self.own / "inside").mkdir(parents=True)
        (self.own / "file").write_bytes(bytes(4096))
        for path in (self.own, self.own / "inside", self.own / "file"):
            os.chown(path, USER, USER)
        self.images.mkdir(mode=0o700)
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", f"--groups={USER}"]
        # Not a child of the test, which would have to reap it before its pid can be used again.
        subprocess.run(
            ["sh", "-c", '"$@" & echo $! > "$0"', str(folder / "pid"), *user, readable_python(), "-I", "-c", PROGRAM],
            cwd=self.own,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        self.pid = int((folder / "pid").read_text())
        wait(lambda: (self.own / "ready").exists())
        self.source = self.facts()
        self.program = programs.opened(str(PREFIX / "criu"))
        done = self._criu("dump", "-t", str(self.pid), env=session.dump_environment(self.program))
        if done.returncode != 0:
            self.end()
            raise AssertionError(self.log("dump"))
        wait(lambda: not os.path.exists(f"/proc/{self.pid}"))

    def _criu(self, verb: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
        options = ["-D", str(self.images), "-v4", "-o", f"{verb}.log", "--ghost-limit", "1M"]
        return subprocess.run(
            [*self.program.argv, verb, *options, *arguments],
            pass_fds=self.program.fds,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def facts(self) -> TreeFacts:
        return tree_facts.gather([self.pid, *children(self.pid)])

    def restore(self, *, as_user: bool = True) -> bool:
        """Restores it, stopped."""
        pids = [process.pid for process in self.source.processes]
        wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # of an attempt that failed
        who = self.source.processes[0].credentials
        as_root = programs.environment(CRIU_LIBS_DIR=self.program.plugins)
        env = session.restore_environment(self.program, self.images, who) if as_user else as_root
        return self._criu("restore", "-d", "--leave-stopped", env=env).returncode == 0

    def log(self, verb: str = "restore") -> str:
        return "\n".join(line for line in (self.images / f"{verb}.log").read_text().splitlines() if "Error" in line)

    def differences(self) -> list[str]:
        return comparison.differences(self.source, self.facts(), other_names={}, carry_paths=[])

    def end(self) -> None:
        for pid in [*children(self.pid), self.pid]:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)
        wait(lambda: not os.path.exists(f"/proc/{self.pid}") or tree.state(self.pid) == "Z")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def rank(open_folder: Path) -> Iterator[Rank]:
    made = Rank(open_folder)
    yield made
    made.end()


def test_restored_copy_is_what_was_described(rank: Rank) -> None:
    described = {one.pid: (one.credentials, one.thread_credentials) for one in rank.source.processes}
    assert len(described) == 2
    verify.must_match(rank.images, described, rank.source.paths())
    assert rank.restore(), rank.log()
    assert rank.differences() == []
    assert comparison.beyond_rights(rank.facts()) == []
    assert (rank.own / "socket").stat().st_uid == USER
    assert sorted(path.name for path in (rank.own / "inside").iterdir()) == []


def swap(path: Path, target: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(target)


def roots_file(rank: Rank) -> Path:
    path = rank.own.parent / "roots"
    path.write_bytes(bytes(4096))
    path.chmod(0o644)
    return path


def test_link_to_a_file_of_root_is_not_opened(rank: Rank) -> None:
    """Without the user's rights criu opens it, and only the comparison finds it."""
    swap(rank.own / "file", roots_file(rank))
    assert not rank.restore()
    assert "Permission denied" in rank.log()
    (rank.own / "socket").unlink(missing_ok=True)
    assert rank.restore(as_user=False), rank.log()
    found = rank.differences()
    assert any(f"({rank.own}/file) is {rank.own.parent}/roots" in one for one in found), found
    assert any(f"mapping of {rank.own}/file" in one for one in found), found
    assert any("may not open" in one for one in comparison.beyond_rights(rank.facts()))


def test_unlinked_file_is_not_created_in_a_directory_of_root(rank: Rank) -> None:
    roots = rank.own.parent / "folder"
    roots.mkdir(mode=0o755)
    before = roots.stat().st_mtime_ns
    swap(rank.own / "inside", roots)
    assert not rank.restore()
    assert roots.stat().st_mtime_ns == before
    (rank.own / "socket").unlink(missing_ok=True)
    rank.restore(as_user=False)
    assert roots.stat().st_mtime_ns != before, "criu as root would have created it: otherwise this test shows nothing"
