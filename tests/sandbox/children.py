"""Starts children that enter a sandbox and try things (`attempts.py`), and interprets filters as the kernel does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import landlock, syscalls

ATTEMPTS = Path(__file__).with_name("attempts.py")
REPOSITORY = ATTEMPTS.parents[2]
USER = [1500, 1500, [1502]]

needs_seccomp = pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters")
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="Landlock is not enabled here")
root = pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox that changes the user cannot be entered without root")


class Tried(NamedTuple):
    results: list[int]
    fields: dict[str, list[str]]


def attempts(steps: list[list[Any]], profile: str | None, *, stdin: int = subprocess.DEVNULL, **plan: Any) -> Tried:
    found = subprocess.run(
        [sys.executable, "-P", str(ATTEMPTS), json.dumps({"enter": profile, "steps": steps, **plan})],
        check=True,
        stdin=stdin,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    answer = json.loads(found.stdout)
    lines = (line.partition(":") for line in answer["status"].splitlines())
    return Tried(answer["results"], {key: value.split() for key, _, value in lines})


def denied(steps: list[list[Any]], profile: str | None, **plan: Any) -> None:
    results = attempts(steps, profile, **plan).results
    assert [
        step for step, result in zip(steps, results, strict=True) if result not in (errno.EPERM, errno.EACCES)
    ] == []


def simulated(program: bytes, machine: str, name: str, *arguments: int) -> int:
    """What the kernel's interpreter returns: the number of the error, or 0 for allowed."""
    number = syscalls.number(name, machine)
    assert number is not None
    words = {0: number, 4: syscalls.ARCHITECTURES[machine]}
    words |= {16 + 8 * at: value & 0xFFFFFFFF for at, value in enumerate(arguments)}
    words |= {20 + 8 * at: value >> 32 & 0xFFFFFFFF for at, value in enumerate(arguments)}
    accumulator, at = 0, 0
    while True:
        code, true, false, value = seccomp_instruction(program, at)
        at += 1
        match code:
            case 0x20:
                accumulator = words.get(value, 0)
            case 0x15:
                at += true if accumulator == value else false
            case 0x35:
                at += true if accumulator >= value else false
            case 0x45:
                at += true if accumulator & value else false
            case 0x06:
                return 0 if value == 0x7FFF0000 else value & 0xFFFF


def seccomp_instruction(program: bytes, at: int) -> tuple[int, int, int, int]:
    code = int.from_bytes(program[8 * at : 8 * at + 2], "little")
    return code, program[8 * at + 2], program[8 * at + 3], int.from_bytes(program[8 * at + 4 : 8 * at + 8], "little")
