"""A stripe that is too large for the memory of its cgroup: the receiver gives up before the kernel kills a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.proc.memory_group import killed, limited

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def run(mib: int) -> tuple[subprocess.CompletedProcess[str], int]:
    """In a group with 400 MiB. Returns how many processes the kernel has killed, too."""
    folder = tempfile.mkdtemp(prefix="stripe-", dir="/dev/shm")
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        with limited(400 * MIB) as command:  # what is in the folder counts in it as well
            program = [sys.executable, "-m", "tests.transport.device.in_little_memory", folder, str(mib)]
            done = subprocess.run(
                [*command, *program], capture_output=True, text=True, env=own, timeout=120, check=False
            )
            dead = killed(command)
            shutil.rmtree(folder)  # its pages belong to the group
            return done, dead
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.root
def test_receiver_gives_up_before_the_kernel_kills_a_process() -> None:
    done, dead = run(160)
    assert (done.returncode, dead) == (0, 0), done.stderr
    assert done.stdout.startswith("{900} full: memory has run out: cgroup "), done.stdout
    assert "128 MiB that must stay free" in done.stdout


@pytest.mark.root
def test_rings_are_given_up_before_the_kernel_kills_a_process() -> None:
    done, dead = run(0)
    assert (done.returncode, dead) == (0, 0), done.stderr
    assert done.stdout.startswith("full: memory has run out: cgroup "), done.stdout
