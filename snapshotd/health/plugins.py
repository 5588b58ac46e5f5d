"""Checks of other Python packages: entry points of the group `snapshotd.health_checks` that the configuration names.

Each runs in a child process of its own (plugin_child.py), as root: one that cannot be imported, raises, hangs or crashes is
"unable" with its reason, and harms nothing else. It reports checks whose names begin with plugin-NAME, and no others, so it
cannot be taken for a check of this program. docs/operations.md has an example.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import msgspec

from snapshotd.health.alarms import Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.programs import SUBJECT, number, plain
from snapshotd.health.settings import PLUGIN, Settings
from snapshotd.runtime import programs

MAX_SIGNALS = 64
MAX_LINE_BYTES = 256 << 10
LEAST_S, MOST_S = 1.0, 86400.0
_CHECK = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_PACKAGES = Path(__file__).resolve().parents[2]


class Answer(msgspec.Struct):
    """What the child answers to one request, as one line of JSON."""

    reason: str = ""  # why it could not be read
    names: list[str] = []
    every_s: float = 0.0  # 0: it did not say
    signals: list[Signal] = []


class Plugin(Group):
    """One entry point."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._check = name, PLUGIN + name
        self.names = (self._check,)
        self.every_s = settings.programs_interval_s
        self._limit_s = settings.programs_limit_s
        self._process: asyncio.subprocess.Process | None = None

    async def read(self, now: Now) -> list[Signal]:
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await self._asked()
        except TimeoutError as error:
            await self._kill()
            raise Unable(f"the entry point {self._name} did not answer within {self._limit_s:g} s") from error
        except (Unable, asyncio.CancelledError):
            await self._kill()
            raise
        if answer.reason:
            raise Unable(f"the entry point {self._name} failed: {plain(answer.reason)[:500]}")
        if answer.every_s:
            self.every_s = min(max(number(answer.every_s), LEAST_S), MOST_S)
        named = [self._check, *filter(self._is_mine, answer.names[:MAX_SIGNALS])]
        self.names = tuple(dict.fromkeys(named))
        if len(answer.signals) > MAX_SIGNALS:
            raise Unable(f"the entry point {self._name} reported more than {MAX_SIGNALS} signals")
        for one in answer.signals:
            if not self._is_mine(one.check):
                shown = plain(one.check)[:100]
                raise Unable(f"the entry point {self._name} reported {shown!r}, and may only report {self._check}…")
        return [_checked(one) for one in answer.signals]

    def _is_mine(self, check: str) -> bool:
        return bool(_CHECK.fullmatch(check)) and (check == self._check or check.startswith(f"{self._check}-"))

    async def _asked(self) -> Answer:
        if self._process is None:
            self._process = await self._started()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"read\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (OSError, ValueError) as error:  # ValueError: the line is too long
            raise Unable(f"the entry point {self._name} failed: {error}") from error
        if not line:
            status = await process.wait()
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise Unable(f"the process of the entry point {self._name} {how}")
        try:
            return msgspec.json.decode(line, type=Answer)
        except ValueError as error:
            raise Unable(f"the entry point {self._name} reported something else than signals: {error}") from error

    async def _started(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "snapshotd.health.plugin_child", self._name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
                cwd="/",
                env=programs.environment(PYTHONPATH=path),
            )
        except OSError as error:
            raise Unable(f"the entry point {self._name} cannot be started: {error.strerror}") from error

    async def _kill(self) -> None:
        """Ends the process and its children. One that hangs in the kernel stays; nothing waits for it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()

    async def close(self) -> None:
        await self._kill()


def _checked(one: Signal) -> Signal:
    subject = plain(one.subject)
    return Signal(
        one.check,
        subject if SUBJECT.fullmatch(subject) else "host",
        one.severity,
        plain(one.text),
        plain(one.remedy),
        number(one.value),
    )
