"""Tests that the reserved signal stays the shim's, and that signal calls return what they would without it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.inprocess import shimctl
from tests.shim.jobs import PROGRAMS, Job, compile_c, python, until

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(PROGRAMS / "signals.c", tmp_path_factory.mktemp("signals") / "signals", "-pthread")


def _output(program: Path, *arguments: str, preload: Path | None) -> list[str]:
    environment = {**os.environ, "LD_PRELOAD": str(preload)} if preload else dict(os.environ)
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_signal_calls_return_what_they_return_without_the_library(library: Path, program: Path) -> None:
    plain = _output(program, preload=None)
    assert "set 61: 0 fine" in plain
    assert "handled 61 with info 1 errno 55" in plain
    assert _output(program, preload=library) == plain


def test_kernel_has_the_handler_and_an_unblocked_signal(library: Path, program: Path) -> None:
    assert _output(program, "kernel", preload=None) == [
        *("alone SigBlk 0", "alone SigCgt 0", "blocked alone SigBlk 1", "blocked alone SigCgt 1"),
        *("thread SigBlk 1", "thread SigCgt 1"),
        "believes: blocked 61: 1 60: 1 10: 1 32: 0",
        *("with a thread SigBlk 1", "with a thread SigCgt 1"),
        *("after everything SigBlk 1", "after everything SigCgt 0"),
    ]
    assert _output(program, "kernel", preload=library) == [
        *("alone SigBlk 0", "alone SigCgt 0", "blocked alone SigBlk 1", "blocked alone SigCgt 1"),
        *("thread SigBlk 0", "thread SigCgt 1"),
        "believes: blocked 61: 1 60: 1 10: 1 32: 0",
        *("with a thread SigBlk 0", "with a thread SigCgt 1"),
        *("after everything SigBlk 0", "after everything SigCgt 1"),
    ]


def test_process_started_with_the_signal_blocked_is_parked(start: Start, work_program: Path, tmp_path: Path) -> None:
    block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    job = start(
        *python(f"{block}; os.execv(sys.argv[1], sys.argv[1:])"), work_program, tmp_path / "counters", "spin", "doze"
    )
    until(lambda: len(os.listdir(f"/proc/{job.pid}/task")) == 6)
    assert shimctl.problems(job.pid) == []
    job.mailbox().park(10)
    job.mailbox().release(10)
    assert job.finish() == ("", "", 0)
