"""What whoever started a job sees of it while it moves: every byte once and in order, every signal once, its own end.

The launcher's side of the keeper across real moves. Nothing here may depend on how long a move takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.harness import WORKLOADS, Cluster, Job, cluster, processes_of, until
from snapshotd.api.errors import Undone

pytestmark = pytest.mark.root

HOME, AWAY, THIRD = "node-1", "spare-1", "node-2"
BLOCK_NUMBERS = 2047  # of workloads/flood.py


@pytest.fixture(scope="module")
def behave() -> Iterator[Cluster]:
    folder = Path(__file__).parent / ".work" / "behave"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder, "behave") as made:
        yield made


@pytest.fixture
def nodes(behave: Cluster) -> Iterator[Cluster]:
    yield behave
    behave.tidy()


class Reader:
    """Reads a pipe to its end in the background."""

    def __init__(self, stream: Any) -> None:
        self.data = bytearray()
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            self.data += data

    def whole(self) -> bytes:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"the pipe has not ended; so far {len(self.data)} bytes"
        self._stream.close()
        return bytes(self.data)

    def await_bytes(self, count: int) -> None:
        until(f"{count} bytes, have {len(self.data)}", lambda: len(self.data) >= count)

    def await_more(self, count: int = 1 << 20) -> None:
        self.await_bytes(len(self.data) + count)


def chain(steps: int) -> str:
    """What workloads/chain.py prints, from its own definition."""
    lines, state = [], b""
    for step in range(steps):
        state = hashlib.sha256(state).digest()
        lines.append(f"step {step} {state.hex()[:16]}\n")
    return "".join([*lines, "DONE\n"])


def end_chain(job: Job) -> None:
    """SIGTERM, and the output is that of an uninterrupted run."""
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(30) == 0
    assert job.text() == chain(len(job.lines()) - 1)


# ---------------------------------------------------------------- stdin


def numbered_lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield b"%08d" % number * 1000 + b"\n"


def answers(lines: list[bytes]) -> list[str]:
    told = [f"{n} {len(line)} {hashlib.sha256(line).hexdigest()[:16]}" for n, line in enumerate(lines, 1)]
    return [*told, f"END {len(lines)}"]


class Feeder:
    """Writes numbered lines into a job's stdin, as fast as they are taken, until told to end."""

    def __init__(self, job: Job) -> None:
        assert job.process.stdin is not None
        self.fed: list[bytes] = []
        self._sink, self._stop = job.process.stdin, threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._sink:  # the job's end is for the test to see
            for line in numbered_lines(1 << 20):
                self._sink.write(line)
                self.fed.append(line)
                if self._stop.is_set() and len(self.fed) > 700:
                    break

    def end(self) -> list[bytes]:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "nobody takes the input"
        return self.fed


def test_every_line_of_stdin_is_answered_once_while_it_moves_twice(nodes: Cluster) -> None:
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


def test_moves_that_are_undone_lose_nothing_either(nodes: Cluster) -> None:
    """At home and away: the keeper takes back what the rank has not read, and gives it again."""
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
    """Eight times what a pipe holds: some of it is in the pipe, some with the keeper, some still in the launcher's."""
    lines = list(numbered_lines(60))
    with (nodes.folder / "input").open("wb+") as file:
        file.writelines(lines)
        file.seek(0)
        job = nodes.start(HOME, [sys.executable, "-c", LATE_READER], stdin=file)
    job.await_lines(1)
    nodes.move(job, AWAY)
    nodes.move(job, THIRD)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish(30) == 0
    assert job.lines() == ["READY", *answers(lines)]


@pytest.mark.parametrize("when", ["unread and short", "while it is frozen", "after the move"])
def test_the_end_of_stdin(nodes: Cluster, when: str) -> None:
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
    assert job.finish(30) == 0
    assert job.lines() == [*(["READY"] if late else []), *answers(lines)]


# ---------------------------------------------------------------- stdout and stderr


def check_blocks(data: bytes, first: int, stride: int) -> int:
    """Fails at the first byte that is not as flood.py wrote it; returns how many blocks there were."""
    size, at, number = BLOCK_NUMBERS * 8 + 1, 0, first
    while not data.startswith(b"END ", at):
        assert data[at : at + size] == b"%08d" % number * BLOCK_NUMBERS + b"\n", f"wrong at byte {at}, block {number}"
        at, number = at + size, number + stride
    assert re.fullmatch(rb"(END \d+\n)+", data[at:]), data[at : at + 100]
    return (number - first) // stride


def test_separate_pipes_of_a_fast_writer(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py", "1", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = Reader(job.process.stdout), Reader(job.process.stderr)
    for node in (AWAY, THIRD):
        out.await_more()
        nodes.move(job, node)
    out.await_more()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(60) == 0
    assert check_blocks(out.whole(), 0, 2) == check_blocks(err.whole(), 1, 2)


def test_one_pipe_for_both_keeps_their_order(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py", "1", "2", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = Reader(job.process.stdout)
    for node in (AWAY, HOME):
        out.await_more()
        nodes.move(job, node)
    out.await_more(10 << 20)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(60) == 0
    assert check_blocks(out.whole(), 0, 1) * BLOCK_NUMBERS * 8 > 10 << 20


def test_a_launcher_that_does_not_read_holds_the_writer_up_across_moves(nodes: Cluster) -> None:
    """The rank is moved in the middle of a write(2) that blocks."""
    job = nodes.workload(HOME, "flood.py", stdout=subprocess.PIPE)
    pid = until("the rank", lambda: nodes.ps(job))[0]["pid"]
    seen: list[str] = []
    until("the writer to block", lambda: stuck_in_write(pid, seen))
    for node in (AWAY, THIRD):
        nodes.move(job, node)
    out = Reader(job.process.stdout)
    out.await_more(8 << 20)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(60) == 0
    check_blocks(out.whole(), 0, 1)


def stuck_in_write(pid: int, seen: list[str]) -> bool:
    """Whether it is in write(2) and has written nothing since the last look."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    seen.append(re.findall(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])
    return words[0] == {"x86_64": "1", "aarch64": "64"}[platform.machine()] and seen[-1:] == seen[-2:-1]


def test_output_to_a_file_is_whole_and_in_order(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "flood.py")
    for number, node in enumerate((AWAY, THIRD), 1):
        until("more output", partial(larger, job.out, number * 10 << 20))
        nodes.move(job, node)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(60) == 0
    check_blocks(job.out.read_bytes(), 0, 1)


def test_a_launcher_that_stops_listening_is_noticed_where_the_rank_is(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py", stdout=subprocess.PIPE)
    assert job.process.stdout is not None
    assert job.process.stdout.readline().startswith(b"step 0 ")
    nodes.move(job, AWAY)
    job.process.stdout.close()
    assert job.finish(20) == 1
    assert "BrokenPipeError" in job.text()


def larger(path: Path, size_bytes: int) -> bool:
    return path.stat().st_size > size_bytes


# ---------------------------------------------------------------- a terminal


class Screen:
    """A terminal with somebody in front of it."""

    def __init__(self, rows: int, columns: int) -> None:
        self._master, self.slave = pty.openpty()
        self.seen = bytearray()
        self.resize(rows, columns)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self.seen += data
        except OSError:
            return

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def shows(self, text: str) -> None:
        until(f"{text!r} on the terminal, which shows {self.seen[-300:]!r}", lambda: text.encode() in self.seen, 20)

    def take(self) -> None:
        """In the child: this is its controlling terminal."""
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def steps(self) -> list[int]:
        return [int(number) for number in re.findall(rb"step (\d+)\r\n", self.seen)]


def test_a_terminal_stays_one(nodes: Cluster) -> None:
    screen = Screen(31, 97)
    before = termios.tcgetattr(screen.slave)
    job = nodes.workload(
        HOME,
        "sitter.py",
        stdin=screen.slave,
        stdout=screen.slave,
        stderr=screen.slave,
        start_new_session=True,
        preexec_fn=screen.take,
        pass_fds=[screen.slave],
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
    assert job.finish(30) == 5
    # Ctrl-C empties a terminal's queues (termios: no NOFLSH), moved or not: each of the three may cost a line, no more.
    steps = screen.steps()
    assert steps == sorted(set(steps))
    assert len(set(range(steps[-1])) - set(steps)) <= 3
    assert termios.tcgetattr(screen.slave) == before


# ---------------------------------------------------------------- signals and the end


def test_each_signal_arrives_once_before_during_and_after_a_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    job.process.send_signal(signal.SIGUSR1)
    job.await_lines(2)
    with nodes.moving(job, AWAY, HOME, "freeze"):
        job.process.send_signal(signal.SIGUSR1)
        until("the keeper to take it", lambda: not pending(job.process.pid, signal.SIGUSR1))
    job.await_lines(3)
    job.process.send_signal(signal.SIGUSR1)
    job.await_lines(4)
    with nodes.moving(job, THIRD, AWAY, "freeze"):  # away: it travels to a guest keeper that holds
        job.process.send_signal(signal.SIGUSR2)
        until("the keeper to take it", lambda: not pending(job.process.pid, signal.SIGUSR2))
    job.await_lines(5)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(30) == 7
    assert job.lines() == ["READY", "SIGUSR1 1", "SIGUSR1 2", "SIGUSR1 3", "SIGUSR2 1", "SIGTERM 1", "END 3 1 1"]


def test_a_stopped_job_stays_stopped_across_a_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    job.process.send_signal(signal.SIGTSTP)
    until("it to stop", lambda: state(nodes.ps(job)[0]["pid"]) == "T")
    nodes.move(job, AWAY)
    pid = nodes.ps(job)[0]["pid"]
    assert state(pid) == "T"
    lines = len(job.lines())
    nodes.move(job, THIRD)
    assert len(job.lines()) == lines
    job.process.send_signal(signal.SIGCONT)
    job.await_progress()
    end_chain(job)


def test_sigcont_never_wakes_a_frozen_rank(nodes: Cluster) -> None:
    """Neither its launcher's nor root's (a scheduler that ends a job sends one): no copy of it runs a step twice."""
    witness = nodes.folder / "sigcont"
    witness.unlink(missing_ok=True)
    job = nodes.workload(HOME, "chain.py", "--witness", str(witness))
    job.await_lines(5)
    pid = nodes.ps(job)[0]["pid"]
    with nodes.moving(job, AWAY, HOME, "freeze") as asked:
        lines = len(job.lines())
        job.process.send_signal(signal.SIGCONT)
        until("the keeper to take it", lambda: not pending(job.process.pid, signal.SIGCONT))
        os.kill(pid, signal.SIGCONT)
        assert nodes.ps(job)[0]["moving"]  # a whole question and answer later
        assert len(job.lines()) == lines
    assert asked.code == 0, asked.answer["reason"]
    job.await_progress()
    end_chain(job)
    steps = [int(line) for line in witness.read_text().split()]
    assert steps == list(range(len(steps)))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_a_job_that_is_ended_while_it_is_frozen_ends_after_the_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    with nodes.moving(job, AWAY, HOME, "freeze") as asked:
        job.process.send_signal(signal.SIGTERM)
    assert asked.code == 0
    assert job.finish(30) == 7
    assert job.lines() == ["READY", "SIGTERM 1", "END 0 0 1"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("abort", -signal.SIGABRT), ("segv", -signal.SIGSEGV), ("default", -signal.SIGTERM)],
)
def test_the_end_of_a_moved_rank_is_the_keepers(nodes: Cluster, end: str, status: int) -> None:
    job = nodes.workload(HOME, "listener.py", "--end", end)
    job.await_lines(1)
    nodes.move(job, AWAY)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(30) == status
    assert "END 0 0 1" in job.lines() or end == "default"


@pytest.mark.parametrize("down", ["home", "target"])
def test_a_rank_that_ends_while_a_daemon_is_down(nodes: Cluster, down: str) -> None:
    """Its status and last words arrive when the daemon is back; the rank is not kept waiting."""
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    nodes.move(job, AWAY)
    pid = nodes.ps(job)[0]["pid"]
    node = HOME if down == "home" else AWAY
    nodes.lab.kill_daemon(node)
    os.kill(pid, signal.SIGTERM)
    until("the rank's end", lambda: not alive(pid))
    assert job.process.poll() is None, "nobody can have told it"
    nodes.lab.start_daemon(node)
    assert job.finish(30) == 7
    assert job.lines() == ["READY", "SIGTERM 1", "END 0 0 1"]
    until("nothing left", lambda: not nodes.leftovers(), 20)


def test_a_rank_at_home_needs_no_daemon_to_end(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    nodes.lab.kill_daemon(HOME)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(10) == 7
    nodes.lab.start_daemon(HOME)
    until("the registry to forget it", lambda: not nodes.ps(job), 20)
    until("nothing left", lambda: not nodes.leftovers(), 20)


def alive(pid: int) -> bool:
    try:
        return state(pid) not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------- who may die


def test_daemons_restart_under_an_away_rank(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    nodes.move(job, AWAY)
    for node in (HOME, AWAY):
        for number in (signal.SIGTERM, signal.SIGKILL):
            nodes.lab.kill_daemon(node, number)
            nodes.lab.start_daemon(node)
            job.await_progress(20)
    end_chain(job)


@pytest.mark.parametrize("place", ["home", "away", "away, its daemon down", "away, home daemon down"])
def test_a_killed_keeper_takes_its_rank_along(nodes: Cluster, place: str) -> None:
    marker = f"killed-{place.replace(' ', '-')}"
    job = nodes.workload(HOME, "chain.py", "--witness", str(nodes.folder / marker))
    job.await_lines(5)
    down = {"away, its daemon down": AWAY, "away, home daemon down": HOME}.get(place)
    if place != "home":
        nodes.move(job, AWAY)
        job.await_progress()
    assert len(processes_of(marker)) == 1
    if down:
        nodes.lab.kill_daemon(down)
    job.process.kill()
    assert job.finish(10) == -signal.SIGKILL
    if down:
        nodes.lab.start_daemon(down)
    until("the rank's end", lambda: not processes_of(marker), 15)
    until("the registry to forget it", lambda: not nodes.ps(job), 15)
    until("nothing left", lambda: not nodes.leftovers(), 15)


# ---------------------------------------------------------------- many moves


def test_twenty_moves_round_three_nodes(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py", "--witness", str(nodes.folder / "twenty"))
    job.await_lines(5)
    for number in range(20):
        nodes.move(job, (THIRD, AWAY, HOME)[number % 3])
        job.await_progress(2)
    places = nodes.ps(job)
    assert [(rank["node"], rank["home"], rank["moves"]) for rank in places if rank["place"] == "here"] == [
        (AWAY, HOME, 20)
    ]
    end_chain(job)
    until("nothing left", lambda: not nodes.leftovers(), 10)
    assert not processes_of(str(nodes.folder / "twenty"))


def test_a_training_job_goes_there_and_back_and_elsewhere(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "train.py", "--steps", "300")
    job.await_lines(20)
    for node in (AWAY, HOME, THIRD):
        nodes.move(job, node)
        job.await_progress(10)
    assert job.finish(60) == 0
    alone = [sys.executable, str(WORKLOADS / "train.py"), "--steps", "300", "--pace-s", "0"]
    assert job.text() == subprocess.run(alone, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- any user


def test_a_users_rank_keeps_its_identity_there_and_back(nodes: Cluster) -> None:
    """Not root, and not our interpreter: the user may not even be able to read our virtual environment."""
    python = "/usr/bin/python3"
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    assert version.stdout.strip() == b"True", f"{python} is older than 3.11; this test needs one that any user can run"
    cpu = max(os.sched_getaffinity(0))
    prefix: list[str] = ["taskset", "-c", str(cpu), "setpriv", "--reuid", "1500", "--regid", "1500", "--groups"]
    prefix += ["1500,1600", "prlimit", "--nofile=512:1024", "--core=0:0", "nice", "-n", "3"]
    prefix += ["sh", "-c", 'umask 027; exec "$@"', "sh"]
    command = [python, "-m", "migrator.cli", "run", "--job", "users", "--"]
    command += [python, str(WORKLOADS / "identity.py"), "--steps", "100000"]
    environment = {**os.environ, "MARKER": "a  b=c", "PYTHONPATH": str(Path.cwd())}
    process = nodes.lab.spawn(
        HOME, [*prefix, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=2, env=environment
    )
    out = Reader(process.stdout)
    job = Job(nodes.lab, process, Path(os.devnull), "users")
    nodes.jobs.append(job)
    identity = f"(1500, 1500, 1500) (1500, 1500, 1500) [1500, 1600] (512, 1024) (0, 0) [{cpu}] a  b=c {Path.cwd()} 3"
    for node in (AWAY, HOME, THIRD):
        out.await_more(500)
        nodes.move(job, node)
    out.await_more(500)
    pid = next(rank["pid"] for rank in nodes.ps(job) if rank["place"] == "here")
    status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    assert status["Umask"] == "0027"
    assert status["Uid"].split() == ["1500"] * 4
    assert status["Cpus_allowed_list"] == str(cpu)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    lines = out.whole().decode().splitlines()
    assert lines == [f"step {step} {identity}" for step in range(len(lines))]
