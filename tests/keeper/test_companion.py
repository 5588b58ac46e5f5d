"""The program beside a rank: it is started again if it fails, and ends with the keeper."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shim.keeper.companion import AGAIN_S, Companion


class Beside:
    """A companion, with the keeper's timers in the test's hands."""

    def __init__(self, code: str) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.said: list[str] = []
        loop: Any = SimpleNamespace(after=lambda seconds, work: self.timers.append((seconds, work)))
        self.one = Companion(lambda uid: [sys.executable, "-c", code, uid], lambda: loop, self.said.append)

    def next(self) -> float:
        """Lets the next timer expire. Returns its time."""
        seconds, work = self.timers.pop(0)
        work()
        return seconds

    def ended(self) -> None:
        process = self.one._process
        assert process is not None
        process.wait(60)


def test_companion_that_fails_is_started_again_less_and_less_often(tmp_path: Path) -> None:
    beside = Beside(f"import sys; open({str(tmp_path / 'ran')!r}, 'a').write(sys.argv[1]); sys.exit(3)")
    beside.one.start("job-0-aa")
    waits = []
    for _ in range(2):
        beside.ended()
        beside.next()
        waits.append(beside.next())
    beside.ended()
    assert (tmp_path / "ran").read_text() == "job-0-aa" * 3
    assert waits == [AGAIN_S, 2 * AGAIN_S]
    assert "status 3" in beside.said[0]


def test_companion_that_is_done_is_not_started_again() -> None:
    beside = Beside("")
    beside.one.start("job-0-aa")
    beside.ended()
    beside.next()
    assert (beside.timers, beside.said) == ([], [])


def test_companion_ends_with_the_keeper_and_has_its_own_session() -> None:
    beside = Beside("import time; time.sleep(1000)")
    beside.one.start("job-0-aa")
    process = beside.one._process
    assert process is not None
    deadline = time.monotonic() + 60
    while os.getsid(process.pid) == os.getsid(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.one.end()
    assert process.wait(60) == -15
    beside.next()
    assert beside.timers == []
