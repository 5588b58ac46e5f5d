"""Guest keepers that are started before the pause: taken once, replaced if they have died, ended if they are not needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.moves.target import waiting_keepers
from snapshotd.moves.target.waiting_keepers import WaitingKeeper

TRUE = shutil.which("true") or "/bin/true"  # in place of criu, which gets no orders here


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    waiting_keepers.close()
    yield
    waiting_keepers.close()


def ended(keeper: WaitingKeeper) -> bool:
    return not Path(f"/proc/{keeper.process.pid}").exists()


def test_one_is_started_in_advance_and_taken_once() -> None:
    waiting_keepers.prepare(TRUE)
    waiting_keepers.prepare(TRUE)
    (prepared,) = waiting_keepers._waiting
    first, second = waiting_keepers.take(TRUE), waiting_keepers.take(TRUE)
    assert first is prepared
    assert second is not prepared
    assert first.process.poll() is None
    for keeper in (first, second):
        keeper.end()
        assert (keeper.process.returncode, ended(keeper)) == (0, True)


def test_one_that_has_died_is_replaced() -> None:
    waiting_keepers.prepare(TRUE)
    (dead,) = waiting_keepers._waiting
    os.kill(dead.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, dead.process.pid, os.WEXITED | os.WNOWAIT)
    taken = waiting_keepers.take(TRUE)
    assert taken is not dead
    assert dead.process.returncode == -signal.SIGKILL
    taken.end()


def test_those_that_are_not_needed_end_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    waiting_keepers.prepare(TRUE)
    (spare,) = waiting_keepers._waiting
    waiting_keepers.close()
    assert (spare.process.returncode, ended(spare)) == (0, True)
    assert capfd.readouterr().err == ""


def test_one_that_has_ended_takes_no_orders() -> None:
    keeper = waiting_keepers.take(TRUE)
    os.kill(keeper.process.pid, signal.SIGKILL)
    keeper.process.wait()
    with pytest.raises(BrokenPipeError):
        keeper.order(b"{}" * (1 << 20), limit_s=60)
    keeper.end()


def test_one_that_does_not_read_its_orders_is_not_awaited_without_a_limit() -> None:
    keeper = waiting_keepers.take(TRUE)
    os.kill(keeper.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        keeper.order(b"{}" * (1 << 20), limit_s=0.1)
    keeper.process.kill()  # as `end` does after some seconds
    keeper.end()
    assert ended(keeper)


def test_orders_that_are_larger_than_a_pipe_arrive_whole() -> None:
    program = "import sys; text = sys.stdin.buffer.read(); sys.exit(0 if text == b'ab' * (1 << 20) else 1)"
    started = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    keeper = waiting_keepers.take(TRUE)
    idle, keeper.process = keeper.process, started
    keeper.order(b"ab" * (1 << 20), limit_s=60)
    assert keeper.wait() == 0
    keeper.process = idle
    keeper.end()
