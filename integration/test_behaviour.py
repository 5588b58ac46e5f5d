"""What a launcher sees of a job that moves: each signal arrives once, the exit status is the rank's, the identity stays.

Standard input and output are in test_stdio.py. Nothing here may depend on how long a move takes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.behaviour import AWAY, HOME, THIRD, Reader, end_chain
from integration.harness import WORKLOADS, Cluster, Job, processes_of, until
from tests.installation import readable_copy, readable_python
from tests.sampling import Sampler

pytestmark = pytest.mark.root


# ---------------------------------------------------------------- signals and exit status


def test_signals_arrive_once_before_during_and_after_a_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    job.process.send_signal(signal.SIGUSR1)
    job.await_lines(2)
    with nodes.moving(job, AWAY, HOME, "freeze"):
        job.process.send_signal(signal.SIGUSR1)
        until("the keeper to receive it", lambda: not pending(job.process.pid, signal.SIGUSR1))
    job.await_lines(3)
    job.process.send_signal(signal.SIGUSR1)
    job.await_lines(4)
    with nodes.moving(
        job, THIRD, AWAY, "freeze"
    ):  # away from home: the signal is relayed to a guest keeper that defers signals
        job.process.send_signal(signal.SIGUSR2)
        until("the keeper to receive it", lambda: not pending(job.process.pid, signal.SIGUSR2))
    job.await_lines(5)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 7
    assert job.lines() == ["READY", "SIGUSR1 1", "SIGUSR1 2", "SIGUSR1 3", "SIGUSR2 1", "SIGTERM 1", "END 3 1 1"]


def test_stopped_job_stays_stopped_across_a_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    job.process.send_signal(signal.SIGTSTP)
    until("the rank to stop", lambda: state(nodes.ps(job)[0]["pid"]) == "T")
    nodes.move(job, AWAY)
    pid = nodes.ps(job)[0]["pid"]
    assert state(pid) == "T"
    lines = len(job.lines())
    nodes.move(job, THIRD)
    assert len(job.lines()) == lines
    job.process.send_signal(signal.SIGCONT)
    job.await_progress()
    end_chain(job)


def test_sigcont_does_not_wake_a_frozen_rank(nodes: Cluster) -> None:
    """Neither from its launcher nor from root (schedulers send one when they end a job). No step runs twice."""
    witness = nodes.folder / "sigcont"
    witness.unlink(missing_ok=True)
    job = nodes.workload(HOME, "chain.py", "--witness", str(witness))
    job.await_lines(5)
    pid = nodes.ps(job)[0]["pid"]
    with nodes.moving(job, AWAY, HOME, "freeze") as asked:
        lines = len(job.lines())
        job.process.send_signal(signal.SIGCONT)
        until("the keeper to receive it", lambda: not pending(job.process.pid, signal.SIGCONT))
        os.kill(pid, signal.SIGCONT)
        assert nodes.ps(job)[0]["moving"]  # a complete RPC later
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


def test_sigterm_to_a_frozen_job_takes_effect_after_the_move(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    with nodes.moving(job, AWAY, HOME, "freeze") as asked:
        job.process.send_signal(signal.SIGTERM)
    assert asked.code == 0
    assert job.finish() == 7
    assert job.lines() == ["READY", "SIGTERM 1", "END 0 0 1"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("abort", -signal.SIGABRT), ("segv", -signal.SIGSEGV), ("default", -signal.SIGTERM)],
)
def test_keeper_exits_as_the_moved_rank_does(nodes: Cluster, end: str, status: int) -> None:
    job = nodes.workload(HOME, "listener.py", "--end", end)
    job.await_lines(1)
    nodes.move(job, AWAY)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == status
    assert "END 0 0 1" in job.lines() or end == "default"


@pytest.mark.parametrize("down", ["home", "target"])
def test_rank_that_ends_while_a_daemon_is_down_is_reported_later(nodes: Cluster, down: str) -> None:
    """Its status and last output arrive when the daemon is back. The rank itself does not wait."""
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    nodes.move(job, AWAY)
    pid = nodes.ps(job)[0]["pid"]
    node = HOME if down == "home" else AWAY
    nodes.lab.kill_daemon(node)
    os.kill(pid, signal.SIGTERM)
    until("the rank's end", lambda: not alive(pid))
    assert job.process.poll() is None, "the keeper cannot know yet"
    nodes.lab.start_daemon(node)
    assert job.finish() == 7
    assert job.lines() == ["READY", "SIGTERM 1", "END 0 0 1"]
    until("leftovers to be removed", lambda: not nodes.leftovers())


def test_rank_at_home_ends_without_its_daemon(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "listener.py")
    job.await_lines(1)
    nodes.lab.kill_daemon(HOME)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 7
    nodes.lab.start_daemon(HOME)
    until("the rank to leave the registry", lambda: not nodes.ps(job))
    until("leftovers to be removed", lambda: not nodes.leftovers())


def alive(pid: int) -> bool:
    try:
        return state(pid) not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------- daemons and keepers that are killed


def test_daemon_restarts_do_not_disturb_a_rank_that_is_away(nodes: Cluster) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    nodes.move(job, AWAY)
    for node in (HOME, AWAY):
        for number in (signal.SIGTERM, signal.SIGKILL):
            nodes.lab.kill_daemon(node, number)
            nodes.lab.start_daemon(node)
            job.await_progress(20)
    end_chain(job)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["home", "away", "away, its daemon down", "away, home daemon down"])
def test_rank_ends_when_its_keeper_is_killed(nodes: Cluster, place: str) -> None:
    marker = str(nodes.folder / f"killed-{place.replace(' ', '-')}")
    job = nodes.workload(HOME, "chain.py", "--witness", marker)
    job.await_lines(5)
    down = {"away, its daemon down": AWAY, "away, home daemon down": HOME}.get(place)
    if place != "home":
        nodes.move(job, AWAY)
        job.await_progress()
    assert len(processes_of(marker)) == 1
    if down:
        nodes.lab.kill_daemon(down)
    job.process.kill()
    assert job.finish() == -signal.SIGKILL
    if down:
        nodes.lab.start_daemon(down)
    until("the rank's end", lambda: not processes_of(marker))
    until("the rank to leave the registry", lambda: not nodes.ps(job))
    until("leftovers to be removed", lambda: not nodes.leftovers())


# ---------------------------------------------------------------- many moves


@pytest.mark.sampled(1, group="long journeys")
def test_rank_moves_many_times_around_three_nodes(nodes: Cluster, sampled: Sampler) -> None:
    route = [(THIRD, AWAY, HOME)[number % 3] for number in range(len(sampled(range(20), 8)))]
    job = nodes.workload(HOME, "chain.py", "--witness", str(nodes.folder / "many"))
    job.await_lines(5)
    for node in route:
        nodes.move(job, node)
        job.await_progress(2)
    places = nodes.ps(job)
    assert [(rank["node"], rank["home"], rank["moves"]) for rank in places if rank["place"] == "here"] == [
        (route[-1], HOME, len(route))
    ]
    end_chain(job)
    until("leftovers to be removed", lambda: not nodes.leftovers())
    assert not processes_of(str(nodes.folder / "many"))


@pytest.mark.sampled(1, group="long journeys")
def test_training_job_moves_three_times(nodes: Cluster) -> None:
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.workload(HOME, "train.py", "--end-file", str(end))
    job.await_lines(20)
    for node in (AWAY, HOME, THIRD):
        nodes.move(job, node)
        job.await_progress(10)
    steps = str(job.end_soon(end))
    assert job.finish() == 0
    alone = [sys.executable, str(WORKLOADS / "train.py"), "--steps", steps, "--pace-s", "0"]
    assert job.text() == subprocess.run(alone, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- any user


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """A folder that every user and every node of a lab can read; the checkout may lie below /root."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="migrator-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_rank_of_another_user_keeps_its_identity(nodes: Cluster, readable_folder: Path) -> None:
    """Neither root nor this interpreter: the user may not be able to read this virtual environment."""
    python = readable_python()
    installed = readable_copy(readable_folder / "installed")
    for name in ("identity.py", "steps.py"):
        shutil.copy(WORKLOADS / name, readable_folder)
    cpu, nice = max(os.sched_getaffinity(0)), os.nice(0) + 3
    prefix: list[str] = ["taskset", "-c", str(cpu), "setpriv", "--reuid", "1500", "--regid", "1500", "--groups"]
    prefix += ["1500,1600", "prlimit", "--nofile=512:1024", "--core=0:0", "nice", "-n", "3"]
    prefix += ["sh", "-c", 'umask 027; exec "$@"', "sh"]
    command = [python, "-m", "migrator.cli", "run", "--job", "users", "--"]
    command += [python, str(readable_folder / "identity.py"), "--steps", "100000"]
    environment = {**os.environ, "MARKER": "a  b=c", "PYTHONPATH": str(installed)}
    process = nodes.lab.spawn(
        *(HOME, [*prefix, *command]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=2,
        env=environment,
        cwd=readable_folder,
    )
    out = Reader(process.stdout)
    job = Job(nodes.lab, process, Path(os.devnull), "users")
    nodes.jobs.append(job)
    identity = (
        f"(1500, 1500, 1500) (1500, 1500, 1500) [1500, 1600] (512, 1024) (0, 0) [{cpu}] a  b=c {readable_folder} {nice}"
    )
    for node in (AWAY, HOME, THIRD):
        out.await_more(500)
        nodes.move(job, node)
    out.await_more(500)
    pid = next(rank["pid"] for rank in nodes.ps(job) if rank["place"] == "here")
    status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    assert status["Umask"] == "0027"
    assert status["Uid"].split() == ["1500"] * 4
    assert status["Cpus_allowed_list"] == str(cpu)
    assert os.getpriority(os.PRIO_PROCESS, pid) == nice
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    *lines, _unfinished = out.whole().decode().split("\n")  # the signal may come in the middle of a line
    assert lines == [f"step {step} {identity}" for step in range(len(lines))]
