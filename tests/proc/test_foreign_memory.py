"""Attacks by processes whose memory never answers, and what the daemon can still read meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged, Timeout
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.inprocess import shimctl
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.source import look_at_place
from snapshotd.proc import environ, fd, foreign_memory, fuse, maps, sizes, stat
from snapshotd.proc.tree import Process

PROGRAM = Path(__file__).with_name("silent_process.py")
#: The daemon's limit is for swapped pages of a busy node. These never arrive.
SHORT_S = 0.5

Silent = Callable[..., tuple[Process, int]]


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse, for a FUSE server that never answers")
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str = "file", user_id: int = 0) -> tuple[Process, int]:
        program = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"WANTED": "1", "FUSE_USER": str(user_id)},
        )
        started.append(program)
        assert program.stdout is not None
        return Process.of(program.pid), int(program.stdout.readline())

    yield start
    for program in started:
        os.killpg(program.pid, signal.SIGKILL)  # with its server: a process that waits for a page gets an error
        program.communicate()


def within(limit_s: float, attempt: Callable[[], object]) -> object:
    """What a call returns or raises. It runs in a thread of its own: one that hangs fails the test and ends with it."""
    result: list[object] = []

    def work() -> None:
        try:
            result.append(attempt())
        except BaseException as error:  # noqa: BLE001 - returned
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert result, f"it has not returned after {limit_s} s"
    return result[0]


def test_page_that_never_arrives_is_given_up_and_not_asked_for_again(silent: Silent) -> None:
    process, address = silent()
    found = within(20, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, SHORT_S, user_id=0))
    assert isinstance(found, Timeout)
    assert "did not answer within" in found.message
    began = time.monotonic()
    with pytest.raises(Timeout, match="did not answer shortly before"):
        foreign_memory.write(process.pid, process.start_ticks, address, b"12345678", user_id=0)
    assert time.monotonic() - began < SHORT_S


def test_silent_process_delays_no_other(silent: Silent) -> None:
    (process, address), (other, _) = silent(), silent()
    hanging = threading.Thread(
        target=within,
        args=(60, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, 20.0, user_id=0)),
    )
    hanging.start()
    began = time.monotonic()
    for _ in range(20):
        assert maps.read_raw(other.pid)
        assert environ.read(other.pid)["WANTED"] == "1"
        assert sizes.anonymous_bytes(other.pid)
    assert time.monotonic() - began < 10
    assert hanging.is_alive(), "it should still wait for its page"
    os.killpg(process.pid, signal.SIGKILL)
    hanging.join(30)
    assert not hanging.is_alive()


def test_library_that_never_arrives_is_given_up(silent: Silent) -> None:
    """The name makes the daemon look at its first page at every check of a rank."""
    process, _ = silent("libsnapshim.so")
    found = within(60, lambda: shimctl.find(process))
    assert isinstance(found, Timeout)
    assert f"the memory of process {process.pid} (python" in found.message
    assert "FUSE" in found.advice
    assert isinstance(within(5, lambda: shimctl.find(process)), Timeout), "the second attempt should be refused at once"


def test_child_that_hangs_ends_with_the_page(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    children = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", children)
    process, address = silent()
    assert isinstance(
        within(20, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, SHORT_S, user_id=0)),
        Timeout,
    )
    os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not all(child.ended() for child in children._ending):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children.close()


def test_memory_is_read_and_written() -> None:
    pid, user_id, text = os.getpid(), os.getuid(), ctypes.create_string_buffer(b"before", 64)
    ticks, address = stat.read(pid).start_ticks, ctypes.addressof(text)
    assert foreign_memory.read(pid, ticks, address, 6, user_id=user_id) == b"before"
    foreign_memory.write(pid, ticks, address, b"after!", user_id=user_id)
    assert text.raw[:6] == b"after!"
    with pytest.raises(ProcessLookupError):
        foreign_memory.read(pid, ticks + 1, address, 6, user_id=user_id)
    for nowhere in (8, 1 << 63, -8):
        with pytest.raises(OSError, match="Input/output error"):
            foreign_memory.read(pid, ticks, nowhere, 6, user_id=user_id)
    with pytest.raises(FileNotFoundError):
        foreign_memory.read_file(0x3FFFFFFF, "maps")


def test_file_of_a_process_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.proc.foreign_memory_child.FILE_BYTES_MAX", 1 << 10)
    with pytest.raises(Damaged, match="has more than"):
        maps.read_raw(os.getpid())


def test_lost_child_is_replaced(children: foreign_memory._Children) -> None:
    assert maps.read_raw(os.getpid())
    children._idle[0]._child.process.kill()
    children._idle[0]._child.process.wait()
    assert maps.read_raw(os.getpid())


#: Becomes a user and has one page with a known text; not dumpable unless it says otherwise.
OWNER = """
import ctypes, os, sys
os.setgroups([1502]); os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3)
ctypes.CDLL(None).prctl(4, int(sys.argv[1]), 0, 0, 0)
text = ctypes.create_string_buffer(b"text of a user", 64)
print(ctypes.addressof(text), flush=True)
sys.stdin.read()
print(text.raw[:14].decode(), flush=True)
"""


@contextlib.contextmanager
def user_process(*, dumpable: bool = True) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-I", "-S", "-c", OWNER, str(int(dumpable))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            yield owner, int(owner.stdout.readline())
        finally:
            owner.kill()


def fields_of(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user cannot be started without root")
@pytest.mark.parametrize("dumpable", [True, False])
def test_memory_is_read_and_written_by_a_child_without_root_s_rights(
    children: foreign_memory._Children, *, dumpable: bool
) -> None:
    with user_process(dumpable=dumpable) as (owner, address):
        ticks = stat.read(owner.pid).start_ticks
        assert foreign_memory.read(owner.pid, ticks, address, 14, user_id=1500) == b"text of a user"
        with contextlib.nullcontext() if dumpable else pytest.raises(PermissionError, match="belongs to user 0"):
            foreign_memory.write(owner.pid, ticks, address, b"TEXT", user_id=1500)
        assert list(maps.read(owner.pid))
        assert sizes.anonymous_bytes(owner.pid)
        assert isinstance(environ.read(owner.pid), dict)
        (child,) = children._idle
        fields = fields_of(child._child.pid)
        user_id = "1500" if dumpable else "0"  # the kernel gives the files of one that is not dumpable to root
        assert fields["Uid"] == (["65534"] * 3 + ["1500"] if dumpable else ["0"] * 4), "a user's for files alone"
        assert fields["Gid"] == [user_id] * 4
        assert fields["Groups"] == (["1502"] if dumpable else [])
        ptrace, checkpoint, search = 1 << 19, 1 << 40, 1 << 2
        assert int(fields["CapPrm"][0], 16) == ptrace | checkpoint | (0 if dumpable else search)
        assert fields["CapEff"] == fields["CapPrm"] == fields["CapBnd"]
        assert fields["NoNewPrivs"] == ["1"]
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.close()
        assert owner.stdout.readline() == ("TEXT of a user\n" if dumpable else "text of a user\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user cannot be started without root")
def test_mapped_file_is_read_with_the_rights_of_the_process_s_user(children: foreign_memory._Children) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        file = Path(place, "sleep")
        shutil.copy("/bin/sleep", file)
        file.chmod(0o755)
        with subprocess.Popen([file, "600"], user=1500, group=1500, extra_groups=[]) as owner:
            try:
                # Started only when the file is executed, which Popen has waited for.
                mapping = next(one for one in maps.read(owner.pid) if one.path == str(file))
                span = mapping.start, mapping.start + mapping.size_bytes
                assert foreign_memory.read_mapped(owner.pid, *span, 0, 4) == b"\x7fELF"
                file.chmod(0o711)
                with pytest.raises(PermissionError):
                    foreign_memory.read_mapped(owner.pid, *span, 0, 4)
            finally:
                owner.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user cannot be started without root")
def test_child_of_one_user_is_not_used_for_another(children: foreign_memory._Children) -> None:
    with user_process() as (owner, _):
        assert maps.read_raw(owner.pid)
        assert maps.read_raw(os.getpid())
        assert maps.read_raw(owner.pid)
        assert [child.ids.user_id for child in children._idle if child.ids] == [0, 1500]


def test_child_that_is_not_needed_for_long_is_ended(children: foreign_memory._Children) -> None:
    started = [foreign_memory._Child(children.spares.take()) for _ in range(2)]
    for one in started:
        one.become(foreign_memory._ids(os.getpid()), foreign_memory.START_S, writes=False)
        children._give_back(one)
    assert maps.read_raw(os.getpid())
    assert children._idle == started, "both may be needed again soon"
    started[0].used_s -= foreign_memory._IDLE_S + 1
    assert maps.read_raw(os.getpid())
    assert children._idle == started[1:]
    started[0].wait(60)
    assert started[0].ended()


def test_prepared_child_is_used(children: foreign_memory._Children) -> None:
    foreign_memory.prepare()
    foreign_memory.prepare()
    first, second = children.spares._started
    assert maps.read_raw(os.getpid())
    assert list(children.spares._started) == [second]
    assert [child._child for child in children._idle] == [first]


def test_files_of_a_users_server_are_refused_without_asking_it(silent: Silent, tmp_path: Path) -> None:
    """The server does not even answer `stat`."""
    process, _ = silent("file", 1500)
    handle = next(
        f"/proc/{process.pid}/fd/{number}"
        for number, link, _ in fd.read_links(process.pid)
        if link == f"{tmp_path}/file"
    )
    asked = threading.Thread(target=lambda: os.path.exists(handle), daemon=True)
    asked.start()
    asked.join(2)
    assert asked.is_alive(), "the attack itself: stat should not return"

    def examine() -> list[Check]:
        return look_at_place(Inspection([process.pid], process.pid, ()))

    checks = within(20, examine)
    assert isinstance(checks, list)
    assert [(check.name, check.verdict) for check in checks] == [("file-systems", Check.REFUSE)]
    assert f"{tmp_path}/file" in checks[0].reason
    os.killpg(process.pid, signal.SIGKILL)
    asked.join(30)


def test_attributes_in_memory_are_those_of_stat(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 9000)
    os.utime(path, ns=(5, 1_700_000_000_123_456_789))
    for name in (str(path), str(tmp_path), "/dev/null"):
        found, known = fuse.stat_in_memory(name), os.stat(name)
        assert tuple(found)[:7] == tuple(known)[:7]
        assert (found.st_mtime_ns, found.st_blocks, found.st_rdev) == (
            known.st_mtime_ns,
            known.st_blocks,
            known.st_rdev,
        )
    with pytest.raises(FileNotFoundError):
        fuse.stat_in_memory(str(tmp_path / "nothing"))


def test_child_that_does_not_start_in_time_is_not_held_against_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    children = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", children)
    with monkeypatch.context() as patch:
        patch.setattr(foreign_memory, "START_S", 0.001)
        with pytest.raises(Timeout, match="did not start within") as raised:
            foreign_memory.read_file(os.getpid(), "maps", 10)
    assert "less busy" in raised.value.advice
    assert foreign_memory.read_file(os.getpid(), "maps", 10)
    children.close()
