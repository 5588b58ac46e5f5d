"""The shim's libraries as its own Makefile builds them: a stale one is built anew before any test uses it."""

from __future__ import annotations

import fcntl
import functools
import subprocess

from tests.shim.jobs import REPOSITORY

SHIM = REPOSITORY / "shim"
LIB = SHIM / "lib"


@functools.cache
def make_shim(*targets: str) -> None:
    """`make -C shim`. Test processes that run at the same time wait for each other."""
    with (SHIM / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(["make", "-s", "-j2", "-C", SHIM, *targets], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
