"""The process of one entry point: `python -m snapshotd.health.plugin_child NAME`. It runs code of other packages.

Answers each line on stdin with a line of JSON (plugins.Answer). What the entry point prints goes nowhere. It has no time
limits; the daemon kills it. It ends with its stdin and with the daemon.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from snapshotd.health.alarms import Signal
from snapshotd.health.check import Now, Unable
from snapshotd.health.plugins import Answer

GROUP = "snapshotd.health_checks"
_PR_SET_PDEATHSIG = 1


class Check:
    """An entry point: a class with a method `read`, of which one object is made, or a function."""

    def __init__(self, name: str) -> None:
        found = importlib.metadata.entry_points(group=GROUP, name=name)
        if not found:
            raise Unable(f"no installed package has an entry point {name} in the group {GROUP}")
        if len(found) > 1:
            raise Unable(f"several packages have it: {', '.join(sorted(each.value for each in found))}")
        loaded = found[name].load()
        check = loaded() if isinstance(loaded, type) else loaded
        self._read: Callable[[Now], Any] = getattr(check, "read", check)
        self._names = [str(each) for each in getattr(check, "names", ())]
        self._every_s = float(getattr(check, "every_s", 0.0))

    async def answer(self) -> Answer:
        result = self._read(Now.taken())
        signals = list(await result if inspect.isawaitable(result) else result)
        for one in signals:
            if not isinstance(one, Signal):
                raise TypeError(f"it returned a {type(one).__name__} instead of a Signal")
        every_s = self._every_s if math.isfinite(self._every_s) else 0.0
        return Answer(names=self._names, every_s=every_s, signals=[_finite(one) for one in signals])


def _finite(one: Signal) -> Signal:
    """JSON has no other numbers."""
    value = float(one.value)
    return msgspec.structs.replace(one, value=value if math.isfinite(value) else 0.0)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the entry point prints must not be taken for an answer
    check: Check | None = None
    with asyncio.Runner() as runner:
        for _ in sys.stdin.buffer:
            try:
                check = check or Check(sys.argv[1])
                line = msgspec.json.encode(runner.run(check.answer()))
            except Exception as error:  # noqa: BLE001 - whatever the entry point raises is its reason
                reason = str(error) if isinstance(error, Unable) else f"{type(error).__name__}: {error}"
                line = msgspec.json.encode(Answer(reason=reason.encode(errors="replace").decode()[:500]))
            answers.write(line + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
