"""Checks of the administrator: executables in a folder, as node-problem-detector and Slurm's HealthCheckProgram have them.

A program exits with 0 if all is well, with 1 for a warning, with 2 for a critical alarm. The last line of its output may be a
JSON object with any of "text", "remedy", "subject", "severity" (notice, warning, critical) and "value". Everything else, such
as another exit code, means that it could not find out.

Invariant: only files that no user but root can change are executed: the daemon is root.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.settings import PROGRAM, Settings
from snapshotd.runtime import programs

MAX_PROGRAMS = 64
MAX_OUTPUT_BYTES = 64 << 10
_AT_ONCE = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SUBJECT = re.compile(r"host|(?:gpu|link|disk|rank):[\w./:-]{1,100}")
_BY_EXIT = {1: Severity.WARNING, 2: Severity.CRITICAL}


@dataclass(frozen=True)
class Result:
    """What a program found out: nothing, a signal, or why it could not."""

    signal: Signal | None = None
    reason: str = ""


class Programs(Group):
    def __init__(self, root: Path, settings: Settings) -> None:
        self._folder = root / settings.programs_dir.lstrip("/")
        self._limit_s = settings.programs_limit_s
        self._off = frozenset(settings.off)
        self.every_s = settings.programs_interval_s
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> dict[str, str]:
        return self._reasons

    async def read(self, now: Now) -> list[Signal]:
        found = self._found()
        self.names = tuple(PROGRAM + name for name in found)
        wanted = {name: reason for name, reason in found.items() if PROGRAM + name not in self._off}
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, refused: str) -> Result:
            if refused:
                return Result(reason=refused)
            async with turns:
                return await run(self._folder / name, PROGRAM + name, self._limit_s)

        results = await asyncio.gather(*(one(*each) for each in wanted.items()))
        self._reasons = {
            PROGRAM + name: result.reason for name, result in zip(wanted, results, strict=True) if result.reason
        }
        return [result.signal for result in results if result.signal is not None]

    def _found(self) -> dict[str, str]:
        """The programs by name, with the reason not to execute them; "": it may be executed."""
        try:
            _must_be_roots(self._folder)
            names = sorted(name for name in os.listdir(self._folder) if _NAME.fullmatch(name))[:MAX_PROGRAMS]
        except FileNotFoundError:
            return {}
        looked_at = {name: _refused(self._folder / name) for name in names}
        return {name: refused for name, refused in looked_at.items() if refused is not None}


def _must_be_roots(folder: Path) -> None:
    """Raises Unable if others than root could put another folder into its place. In one that is sticky, as /tmp, they cannot
    replace what is root's."""
    if refused := _changeable(folder.stat()):
        raise Unable(f"{folder} {refused}")
    for above in folder.resolve().parents:
        found = above.stat()
        if (refused := _changeable(found)) and not (found.st_uid == 0 and found.st_mode & stat.S_ISVTX):
            raise Unable(f"{above}, in which {folder} is, {refused}")


def _refused(path: Path) -> str | None:
    """Why a file is not executed; "" if it may be, None if it is no program."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and not found.st_mode & 0o111):
        return None
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    refused = _changeable(found)
    return f"{path} {refused}" if refused else ""


def _changeable(found: os.stat_result) -> str:
    """Whether others than root can change it, in words."""
    if found.st_uid != 0:
        return "does not belong to root"
    return "can be written by others than root" if found.st_mode & 0o022 else ""


async def run(path: Path, check: str, limit_s: float) -> Result:
    """Runs one program to its end, or to the limit."""
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=programs.environment(),
        )
    except OSError as error:
        return Result(reason=f"{path} cannot be executed: {error.strerror}")
    try:
        async with asyncio.timeout(limit_s):
            output = await _output(process)
            status = await process.wait()
    except TimeoutError:
        return Result(reason=f"{path} did not end within {limit_s:g} s")
    finally:
        # Its children too. A process that hangs in the kernel stays; nothing waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
    return judged(check, path, status, output)


async def _output(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    output = b""
    while chunk := await process.stdout.read(MAX_OUTPUT_BYTES):
        output = (output + chunk)[-MAX_OUTPUT_BYTES:]
    return output


def judged(check: str, path: Path, status: int, output: bytes) -> Result:
    """What exit code and output mean."""
    if status == 0:
        return Result()
    if status not in _BY_EXIT:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return Result(reason=f"{path} {how}, which is none of 0 (all is well), 1 (warning) and 2 (critical)")
    lines = output.decode(errors="replace").strip().splitlines()
    said: dict[str, Any] = {}
    if lines:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(lines[-1])
            said = found if isinstance(found, dict) else {}
    severity = _BY_EXIT[status]
    if str(said.get("severity", "")).upper() in Severity.__members__:
        severity = Severity[str(said["severity"]).upper()]
    subject = plain(said.get("subject", "host"))
    text = plain(said.get("text") or (lines[-1] if lines and not said else f"{path.name} ended with status {status}"))
    return Result(
        Signal(
            check,
            subject if SUBJECT.fullmatch(subject) else "host",
            severity,
            text,
            plain(said.get("remedy", f"see what {path} checks")),
            number(said.get("value", 0)),
        )
    )


def plain(said: object) -> str:
    """As text that can be written as UTF-8: JSON can have half a surrogate pair."""
    return str(said).encode(errors="replace").decode()


def number(said: object) -> float:
    """What it measured; 0 for what is no finite number. JSON of Python has such, and numbers of any size."""
    if isinstance(said, bool) or not isinstance(said, int | float):
        return 0.0
    try:
        found = float(said)
    except OverflowError:
        return 0.0
    return found if math.isfinite(found) else 0.0
