"""Stopping, freezing and killing a real process tree in a real cgroup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from snapshotd.proc import cgroup, stat, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process

FAMILY = """
import os, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for _ in range(3):
    if os.fork() == 0:
        break
print(os.getpid(), flush=True)
while True: time.sleep(0.001)
"""


@pytest.fixture
def family() -> Iterator[tuple[Cgroup, subprocess.Popen[bytes]]]:
    group = Cgroup(cgroup.of_process(os.getpid()) / f"test-tree-{os.getpid()}").create()
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
    group.add(process.pid)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    for pid in tree.children(process.pid):
        group.add(pid)
    yield group, process
    group.kill(10)
    process.wait()
    process.stdout.close()
    group.remove()
    assert not group.exists()


def test_tree_is_stopped_frozen_and_continued(family: tuple[Cgroup, subprocess.Popen[bytes]]) -> None:
    group, _ = family
    pids = group.pids()
    assert len(pids) == 4
    tree.stop_all(group, 10)
    assert all(tree.stopped(pid) for pid in pids)
    group.freeze(10)
    assert group.frozen()
    tree.continue_all(group)
    group.thaw(10)
    assert not group.frozen()
    assert all(tree.state(pid) in "RS" for pid in pids)


def test_process_that_was_stopped_before_stays_stopped(family: tuple[Cgroup, subprocess.Popen[bytes]]) -> None:
    group, process = family
    pids = group.pids()
    tree.stop_all(group, 10)
    tree.continue_all(group, leave_stopped=[process.pid])
    assert tree.state(process.pid) == "T"
    assert all(tree.state(pid) in "RS" for pid in pids if pid != process.pid)


def test_frozen_tree_can_be_killed(family: tuple[Cgroup, subprocess.Popen[bytes]]) -> None:
    group, process = family
    tree.stop_all(group, 10)
    group.freeze(10)
    group.kill(10)
    assert process.wait(60) == -signal.SIGKILL
    assert group.pids() == []


def test_reused_pid_is_never_signalled() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        imposter = Process(process.pid, Process.of(process.pid).start_ticks + 1)
        assert not imposter.alive()
        assert imposter.signal(signal.SIGKILL) is False
        time.sleep(0.05)
        assert process.poll() is None
        assert Process.of(process.pid).signal(signal.SIGKILL) is True
    finally:
        process.wait(60)
    assert not tree.Process(process.pid, 0).alive()


class Reused(tree.PidList):
    """A group in whose list the pid of a process that has ended appears once more: another process has it by now."""

    def __init__(self, pid: int, stale: int) -> None:
        self._pid, self._stale = pid, stale

    def pids(self) -> list[int]:
        self._stale -= 1
        return [self._pid] if self._stale >= 0 else []


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(60)


def test_process_that_got_the_pid_of_a_member_is_not_stopped(bystander: subprocess.Popen[bytes]) -> None:
    """An attack: a process of the rank ends at the right moment, and its pid is given to another user's process."""
    tree.stop_all(Reused(bystander.pid, stale=1), 10)
    assert tree.state(bystander.pid) in "RS"


def test_process_that_got_the_pid_of_a_member_is_not_continued(bystander: subprocess.Popen[bytes]) -> None:
    Process.of(bystander.pid).signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not tree.stopped(bystander.pid):
        assert time.monotonic() < deadline
    tree.continue_all(Reused(bystander.pid, stale=1))
    assert tree.state(bystander.pid) == "T"


def test_thread_that_got_the_number_of_another_is_not_signalled(bystander: subprocess.Popen[bytes]) -> None:
    """The thread of another process, and that of a process with another start time."""
    ourselves = Process.of(os.getpid())
    assert ourselves.signal_thread(bystander.pid, signal.SIGKILL) is False
    process = Process.of(bystander.pid)
    assert Process(process.pid, process.start_ticks + 1).signal_thread(process.pid, signal.SIGKILL) is False
    assert tree.state(bystander.pid) in "RS"
    assert process.signal_thread(process.pid, signal.SIGKILL) is True
    assert bystander.wait(60) == -signal.SIGKILL


def test_signal_reaches_one_thread() -> None:
    """Only the thread that does not block the signal would otherwise get it."""
    text = """
import signal, threading
def wait(): print(threading.get_native_id(), flush=True); print(signal.sigwait({signal.SIGUSR1}), flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
threading.Thread(target=wait).start()
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        thread = int(program.stdout.readline())
        process = Process.of(program.pid)
        assert process.signal_thread(thread, signal.SIGUSR1) is True
        assert int(program.stdout.readline()) == signal.SIGUSR1
        assert program.wait(60) == 0
        assert process.signal_thread(thread, signal.SIGUSR1) is False


def test_more_processes_than_pidfds_at_once_are_signalled(
    family: tuple[Cgroup, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_BATCH", 3)
    group, _ = family
    tree.stop_all(group, 10)
    assert all(tree.stopped(pid) for pid in group.pids())
    tree.continue_all(group)
    assert all(tree.state(pid) in "RS" for pid in group.pids())


def test_process_that_begins_to_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "600"])
    process, looks = Process.of(child.pid), iter([True, True])

    def exiting(pid: int) -> bool:
        if next(looks, None):
            return True
        child.kill()
        child.wait()
        return True

    monkeypatch.setattr(stat, "exiting", exiting)
    assert not process.goes_on()
    assert next(looks, None) is None


def test_process_whose_program_another_thread_replaces_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True, True, False])
    monkeypatch.setattr(stat, "exiting", lambda pid: next(looks))
    assert Process.of(os.getpid()).goes_on()
    assert list(looks) == []


def test_process_that_does_not_finish_ending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat, "exiting", lambda pid: True)
    assert not Process.of(os.getpid()).goes_on(patience_s=0.01)


def test_processes_whose_memory_is_gone_have_ended() -> None:
    """Real ones, in the moment between the loss of their memory and their end."""
    for _ in range(200):
        child = subprocess.Popen(["sleep", "600"])
        process = Process.of(child.pid)
        child.kill()
        try:
            while True:
                with open(f"/proc/{child.pid}/maps", "rb") as maps:
                    if not maps.read():
                        break
        except ProcessLookupError:
            pass
        goes_on = process.goes_on()
        child.wait()
        assert not goes_on
