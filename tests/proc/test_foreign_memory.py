"""Attacks by processes whose memory never answers, and what the daemon can still read meanwhile."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged, Timeout
from snapshotd.inprocess import shimctl
from snapshotd.proc import environ, foreign_memory, maps, sizes, stat
from snapshotd.proc.tree import Process

PROGRAM = Path(__file__).with_name("silent_process.py")
#: The daemon's limit is for swapped pages of a busy node. These never arrive.
SHORT_S = 0.5

Silent = Callable[..., tuple[Process, int]]


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this kernel has no FUSE")
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str = "file") -> tuple[Process, int]:
        program = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"WANTED": "1"},
        )
        started.append(program)
        assert program.stdout is not None
        return Process.of(program.pid), int(program.stdout.readline())

    yield start
    for program in started:
        os.killpg(program.pid, signal.SIGKILL)  # with its server: whoever waits for a page gets an error
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
    found = within(20, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, SHORT_S))
    assert isinstance(found, Timeout)
    assert "did not answer within" in found.message
    began = time.monotonic()
    with pytest.raises(Timeout, match="did not answer shortly before"):
        foreign_memory.write(process.pid, process.start_ticks, address, b"12345678")
    assert time.monotonic() - began < SHORT_S


def test_silent_process_delays_no_other(silent: Silent) -> None:
    (process, address), (other, _) = silent(), silent()
    hanging = threading.Thread(
        target=within, args=(60, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, 20.0))
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
        within(20, lambda: foreign_memory.read(process.pid, process.start_ticks, address, 8, SHORT_S)), Timeout
    )
    os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not all(child.ended() for child in children._ending):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children.close()


def test_memory_is_read_and_written() -> None:
    pid, text = os.getpid(), ctypes.create_string_buffer(b"before", 64)
    ticks, address = stat.read(pid).start_ticks, ctypes.addressof(text)
    assert foreign_memory.read(pid, ticks, address, 6) == b"before"
    foreign_memory.write(pid, ticks, address, b"after!")
    assert text.raw[:6] == b"after!"
    with pytest.raises(ProcessLookupError):
        foreign_memory.read(pid, ticks + 1, address, 6)
    for nowhere in (8, 1 << 63, -8):
        with pytest.raises(OSError, match="Input/output error"):
            foreign_memory.read(pid, ticks, nowhere, 6)
    with pytest.raises(FileNotFoundError):
        foreign_memory.read_file(0x3FFFFFFF, "maps")


def test_file_of_a_process_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(foreign_memory._PROGRAM.read_text().replace("64 << 20", "1 << 10"))
    monkeypatch.setattr(foreign_memory, "_PROGRAM", program)
    monkeypatch.setattr(foreign_memory, "_children", foreign_memory._Children())
    with pytest.raises(Damaged, match="has more than"):
        maps.read_raw(os.getpid())
    foreign_memory._children.close()


def test_lost_child_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    children = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", children)
    assert maps.read_raw(os.getpid())
    children._idle[0]._process.kill()
    children._idle[0]._process.wait()
    assert maps.read_raw(os.getpid())
    children.close()
