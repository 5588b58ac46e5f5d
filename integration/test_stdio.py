"""Standard input and output of a job that moves: every byte arrives once and in order, on pipes, files and terminals.

Nothing here may depend on how long a move takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from integration.behaviour import AWAY, HOME, THIRD, Reader
from integration.harness import WORKLOADS, Cluster, Job, until
from integration.screen import Screen
from snapshotd.api.errors import Undone

pytestmark = [pytest.mark.root, pytest.mark.sampled(6, group="stdio")]

BLOCK_NUMBERS = 2047  # of workloads/flood.py


# ---------------------------------------------------------------- stdin


def numbered_lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield b"%08d" % number * 1000 + b"\n"


def answers(lines: list[bytes]) -> list[str]:
    result = [f"{n} {len(line)} {hashlib.sha256(line).hexdigest()[:16]}" for n, line in enumerate(lines, 1)]
    return [*result, f"END {len(lines)}"]


class Feeder:
    """Writes numbered lines into a job's stdin, as fast as the job reads them, until `end`."""

    def __init__(self, job: Job) -> None:
        assert job.process.stdin is not None
        self.fed: list[bytes] = []
        self._sink, self._stop = job.process.stdin, threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._sink:  # the test itself checks how the job ended
            for line in numbered_lines(1 << 20):
                self._sink.write(line)
                self.fed.append(line)
                if self._stop.is_set() and len(self.fed) > 700:
                    break

    def end(self) -> list[bytes]:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "no process reads the input"
        return self.fed


def test_every_line_of_stdin_is_answered_once_across_two_moves(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "echo.py", stdin=subprocess.PIPE)
    feeder = Feeder(job)
    job.await_lines(100)
    for node in (AWAY, THIRD):
        nodes.move(job, node)
        job.await_progress(50)
    fed = feeder.end()
    assert job.finish() == 0
    assert job.lines() == answers(fed)
    assert sum(len(line) for line in fed) > 5 << 20


def test_undone_moves_lose_no_input(nodes: Cluster) -> None:
    """At home and away: the keeper takes back input that the rank has not read, and delivers it again."""
    job = nodes.workload(HOME, "echo.py", stdin=subprocess.PIPE)
    feeder = Feeder(job)
    job.await_lines(100)
    nodes.fault(THIRD, "before-restore", "fail")
    nodes.move(job, THIRD, expect=Undone.exit_code)
    job.await_progress(50)
    nodes.move(job, AWAY)
    job.await_progress(50)
    nodes.fault(THIRD, "before-restore", "fail")
    nodes.move(job, THIRD, expect=Undone.exit_code)
    job.await_progress(50)
    fed = feeder.end()
    assert job.finish() == 0
    assert job.lines() == answers(fed)


LATE_READER = f"""
import signal, runpy
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
print("READY", flush=True)
signal.sigwait({{signal.SIGUSR1}})
runpy.run_path({str(WORKLOADS / "echo.py")!r})
"""


def test_stdin_that_ended_unread_before_a_move_is_read_after_it(nodes: Cluster) -> None:
    """Eight times the capacity of a pipe: some is in the rank's pipe, some in the keeper, some in the launcher's file."""
    lines = list(numbered_lines(60))
    with (nodes.folder / "input").open("wb+") as file:
        file.writelines(lines)
        file.seek(0)
        job = nodes.start(HOME, [sys.executable, "-c", LATE_READER], stdin=file)
    job.await_lines(1)
    nodes.move(job, AWAY)
    nodes.move(job, THIRD)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish() == 0
    assert job.lines() == ["READY", *answers(lines)]


@pytest.mark.parametrize("when", ["unread and short", "while it is frozen", "after the move"])
def test_end_of_stdin_reaches_the_rank(nodes: Cluster, when: str) -> None:
    lines = list(numbered_lines(4))
    late = when == "unread and short"
    argv = [sys.executable, "-c", LATE_READER] if late else [sys.executable, str(WORKLOADS / "echo.py")]
    job = nodes.start(HOME, argv, stdin=subprocess.PIPE)
    sink = job.process.stdin
    assert sink is not None
    sink.writelines(lines)
    sink.flush()
    if late:
        sink.close()
        job.await_lines(1)
        nodes.move(job, AWAY)
        job.process.send_signal(signal.SIGUSR1)
    elif when == "while it is frozen":
        job.await_lines(4)
        with nodes.moving(job, AWAY, HOME, "freeze"):
            sink.close()
    else:
        job.await_lines(4)
        nodes.move(job, AWAY)
        sink.close()
    assert job.finish() == 0
    assert job.lines() == [*(["READY"] if late else []), *answers(lines)]


# ---------------------------------------------------------------- stdout and stderr


def check_blocks(data: bytes, first: int, stride: int) -> int:
    """Fails at the first byte that flood.py did not write; returns the number of blocks."""
    size, at, number = BLOCK_NUMBERS * 8 + 1, 0, first
    while not data.startswith(b"END ", at):
        assert data[at : at + size] == b"%08d" % number * BLOCK_NUMBERS + b"\n", f"wrong at byte {at}, block {number}"
        at, number = at + size, number + stride
    assert re.fullmatch(rb"(END \d+\n)+", data[at:]), data[at : at + 100]
    return (number - first) // stride


def test_separate_pipes_of_a_fast_writer_are_complete(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py", "1", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = Reader(job.process.stdout), Reader(job.process.stderr)
    for node in (AWAY, THIRD):
        out.await_more()
        nodes.move(job, node)
    out.await_more()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    assert check_blocks(out.whole(), 0, 2) == check_blocks(err.whole(), 1, 2)


def test_shared_pipe_keeps_the_order_of_stdout_and_stderr(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py", "1", "2", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = Reader(job.process.stdout)
    for node in (AWAY, HOME):
        out.await_more()
        nodes.move(job, node)
    out.await_more(10 << 20)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    assert check_blocks(out.whole(), 0, 1) * BLOCK_NUMBERS * 8 > 10 << 20


def test_writer_that_blocks_stays_blocked_across_moves(nodes: Cluster) -> None:
    """The rank moves during a write(2) that blocks because its launcher does not read."""
    job = nodes.workload(HOME, "flood.py", stdout=subprocess.PIPE)
    pid = until("the rank", lambda: nodes.ps(job))[0]["pid"]
    seen: list[str] = []
    until("the writer to block", lambda: stuck_in_write(pid, seen))
    for node in (AWAY, THIRD):
        nodes.move(job, node)
    out = Reader(job.process.stdout)
    out.await_more(8 << 20)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    check_blocks(out.whole(), 0, 1)


def stuck_in_write(pid: int, seen: list[str]) -> bool:
    """Whether the process is in write(2) and has written nothing since the previous call."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    seen.append(re.findall(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])
    return words[0] == {"x86_64": "1", "aarch64": "64"}[platform.machine()] and seen[-1:] == seen[-2:-1]


def test_output_to_a_file_is_complete_and_in_order(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py")
    for number, node in enumerate((AWAY, THIRD), 1):
        until("more output", partial(larger, job.out, number * 10 << 20))
        nodes.move(job, node)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    check_blocks(job.out.read_bytes(), 0, 1)


def test_moved_rank_gets_sigpipe_when_its_launcher_stops_reading(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py", stdout=subprocess.PIPE)
    assert job.process.stdout is not None
    assert job.process.stdout.readline().startswith(b"step 0 ")
    nodes.move(job, AWAY)
    job.process.stdout.close()
    assert job.finish() in (1, 120)  # 120: Python noticed when it flushed at its end
    assert "BrokenPipeError" in job.text()


def larger(path: Path, size_bytes: int) -> bool:
    return path.stat().st_size > size_bytes


# ---------------------------------------------------------------- a terminal


def test_terminal_stays_a_terminal(nodes: Cluster) -> None:
    screen = Screen(31, 97)
    before = termios.tcgetattr(screen.slave)
    job = nodes.workload(
        HOME,
        "sitter.py",
        **screen.of_a_job(),
    )
    screen.shows("sits True True True 31x97")
    screen.type(b"hello\n")
    screen.shows("line hello\r\n")
    nodes.move(job, AWAY)
    screen.type(b"\x03")
    screen.shows("interrupt 1\r\n")
    screen.resize(40, 120)
    screen.shows("sits True True True 40x120")
    screen.type(b"from afar\n")
    screen.shows("line from afar\r\n")
    screen.type(b"half a ")
    with nodes.moving(job, THIRD, AWAY, "freeze"):
        screen.type(b"line\n")
    screen.shows("line half a line\r\n")
    screen.type(b"\x03")
    screen.shows("interrupt 2\r\n")
    nodes.move(job, HOME)
    screen.type(b"\x03")
    screen.shows("DONE\r\n")
    assert job.finish() == 5
    # Ctrl-C flushes a terminal's queues (termios without NOFLSH), moved or not: each of the three may cost one line.
    steps = screen.steps()
    assert steps == sorted(set(steps))
    assert len(set(range(steps[-1])) - set(steps)) <= 3
    assert termios.tcgetattr(screen.slave) == before
