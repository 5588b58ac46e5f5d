"""A child can neither have the kernel signal other processes, nor change their limits, nor outlive the daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import syscalls
from snapshotd.sandbox.profiles import Profile
from tests.sandbox.children import USER, attempts, denied, needs_seccomp, root, simulated

FILTERED = ["NETWORK", "FILES", "LOOK", "MEMORY", "PARSER", "TRACKER", "COPIER", "STRIPE"]
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], user=1500, group=1500, extra_groups=[])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def claims(pid: int) -> list[list[Any]]:
    """Makes a process the one that is signalled when something arrives at descriptor 0."""
    return [["call", "fcntl", 0, F_SETOWN, pid], ["call", "fcntl", 0, F_SETSIG, signal.SIGKILL]]


def owner_of(descriptor: socket.socket) -> int:
    found: int = struct.unpack("ii", fcntl.fcntl(descriptor, 16, bytes(8)))[1]  # F_GETOWN_EX
    return found


@root
def test_owner_of_a_descriptor_is_killed_without_a_sandbox(victim: subprocess.Popen[bytes]) -> None:
    """Otherwise the next test would show nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        steps = [*claims(victim.pid), ["call", "fcntl", 0, fcntl.F_SETFL, os.O_ASYNC]]
        assert attempts(steps, None, stdin=theirs.fileno()).results == [0, 0, 0]
        ours.send(b"x")
        assert victim.wait(60) == -signal.SIGKILL


@root
@needs_seccomp
@pytest.mark.parametrize("profile", FILTERED)
def test_child_makes_no_process_the_owner_of_a_descriptor(profile: str, victim: subprocess.Popen[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        steps = [*claims(victim.pid), ["call", "fcntl", 0, F_SETOWN_EX, 0]]
        steps += [["call", "ioctl", 0, FIOSETOWN, 0], ["call", "ioctl", 0, SIOCSPGRP, 0]]
        denied(steps, profile, ids=USER, stdin=theirs.fileno())
        assert owner_of(theirs) == 0


@root
@needs_seccomp
@pytest.mark.parametrize("profile", ["NETWORK", "FILES", "LOOK", "MEMORY", "STRIPE"])
def test_child_sees_and_sets_its_own_limits_alone(profile: str) -> None:
    steps: list[list[Any]] = [["call", "prlimit64", os.getpid(), 0, 0, 0], ["call", "prlimit64", 0, 0, 0, 0]]
    assert attempts(steps, None).results == [0, 0]
    assert attempts(steps, "filter only", rules=profile).results == [errno.EPERM, 0]


@root
@needs_seccomp
@pytest.mark.parametrize("profile", ["NETWORK", "FILES", "LOOK", "MEMORY", "STRIPE"])
def test_child_cannot_arrange_to_outlive_the_daemon(profile: str) -> None:
    steps: list[list[Any]] = [["call", "prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0]]
    assert attempts(steps, None, **{"dies with": 9}).results[0] == 0
    assert attempts(steps, profile, ids=USER, **{"dies with": 9}).results == [errno.EPERM, 9]


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
@pytest.mark.parametrize("profile", FILTERED)
def test_these_rules_are_right_on_both_architectures(machine: str, profile: str) -> None:
    rules = Profile[profile].value
    program = seccomp.compiled(rules.denied, rules.allowed, machine)
    for command in (F_SETOWN, F_SETSIG, F_SETOWN_EX):
        assert simulated(program, machine, "fcntl", 0, command) == errno.EPERM
    assert simulated(program, machine, "fcntl", 0, fcntl.F_SETFL) == 0
    assert simulated(program, machine, "prlimit64", 1) == errno.EPERM
    assert simulated(program, machine, "prctl", PR_SET_PDEATHSIG) == errno.EPERM
    if profile not in {"PARSER", "TRACKER", "COPIER"}:
        assert simulated(program, machine, "prlimit64", 0) == 0
        assert simulated(program, machine, "prctl", PR_SET_NAME) == 0
