"""Builds the fake NCCL once for all tests, below tests/fakes/nccl/build. Test processes wait for each other."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "nccl"
CURRENT, OLD = 22809, 21805


@functools.cache
def build(version: int = CURRENT, sanitizer: str = "") -> Path:
    """Returns the folder with libnccl.so.2, libfakestreams.so.1, libnote_calls.so and (current version only) check_ranks."""
    folder = SOURCES / "build" / "-".join(filter(None, (str(version), sanitizer)))
    names = ["libnccl.so.2", "libnote_calls.so"]
    if version == CURRENT:  # the program uses functions that older versions lack
        names.append("check_ranks")
    targets = [folder / name for name in names]
    command: list[str | Path] = [
        "make",
        "-s",
        "-j2",
        "-C",
        SOURCES,
        f"BUILD={folder}",
        f"VERSION={version}",
        f"SANITIZE={sanitizer}",
    ]
    with (SOURCES / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run([*command, *targets], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder
