"""Stopping, freezing and killing a real process tree in a real cgroup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from snapshotd.proc import cgroup, tree
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
    tree.continue_all(pids)
    group.thaw(10)
    assert not group.frozen()
    assert all(tree.state(pid) in "RS" for pid in pids)


def test_process_that_was_stopped_before_stays_stopped(family: tuple[Cgroup, subprocess.Popen[bytes]]) -> None:
    group, process = family
    pids = group.pids()
    tree.stop_all(group, 10)
    tree.continue_all(pids, leave_stopped=[process.pid])
    assert tree.state(process.pid) == "T"
    assert all(tree.state(pid) in "RS" for pid in pids if pid != process.pid)


def test_frozen_tree_can_be_killed(family: tuple[Cgroup, subprocess.Popen[bytes]]) -> None:
    group, process = family
    tree.stop_all(group, 10)
    group.freeze(10)
    group.kill(10)
    assert process.wait(10) == -signal.SIGKILL
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
        process.wait(10)
    assert not tree.Process(process.pid, 0).alive()
