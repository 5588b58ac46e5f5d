"""Tests Ctrl-C and SIGTERM during `migrator move`: the move is undone, or left to the daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.api.errors import OutcomeUnknown, Undone
from tests.cli.fake_daemon import FakeCluster

ROOT = Path(__file__).parents[2]


#: Like the real driver, this one is cancelled once and then takes its time. It announces every step on stderr.
INTERRUPTIBLE = """
import asyncio, sys
import migrator.driver
from migrator.protocol import Verdict
from migrator.results import Event, MoveResult
from snapshotd.api.errors import Undone, Where
from migrator.cli import main

class Driver:
    def __init__(self, cluster, on_event, trace):
        self.on_event = on_event
    async def move(self, ask):
        self.on_event(Event("note", "", 0, 0, 0, "READY"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if MODE == "early":
                raise
        if MODE == "stuck":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        return MoveResult("m-0123456789ab", "train", 1, "node-1", "spare-1", Verdict.UNDONE, 0.0, 0,
                          reason="interrupted", where=Where.SOURCE_RUNNING, error_code=Undone.code,
                          remedy=Undone.remedy, exit_code=Undone.exit_code)

migrator.driver.Driver = Driver
sys.exit(main(["move", "--rank", "1", "--to", "spare-1", *sys.argv[1:]]))
"""


def interrupt(cluster: FakeCluster, mode: str, numbers: list[signal.Signals], *options: str) -> tuple[int, str, str]:
    """Runs a move and sends the signals, each when the program has printed that it is ready for it."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"MODE = {mode!r}\n{INTERRUPTIBLE}", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stderr is not None
        reply: list[str] = []
        try:
            for number, ready in zip(numbers, ("READY", "interrupted"), strict=False):
                while ready not in (line := child.stderr.readline()):
                    assert line, reply
                    reply.append(line)
                reply.append(line)
                child.send_signal(number)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    return child.returncode, out, "".join(reply) + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_makes_the_driver_undo_the_move(cluster: FakeCluster, number: signal.Signals) -> None:
    code, out, err = interrupt(cluster, "undoes", [number])
    assert (code, out) == (Undone.exit_code, "")
    assert "interrupted: undoing the move" in err
    assert err.splitlines()[-2] == "  the rank is: running on source (node-1)"


def test_second_interrupt_exits_and_leaves_the_move_to_the_daemons(cluster: FakeCluster) -> None:
    code, out, err = interrupt(cluster, "stuck", [signal.SIGINT, signal.SIGINT])
    assert (code, out) == (OutcomeUnknown.exit_code, "")
    assert "the daemons finish it" in err
    assert err.splitlines()[-2] == "  the rank is: unknown"
    assert "Traceback" not in err


def test_interrupt_before_any_change_reports_an_untouched_rank(cluster: FakeCluster) -> None:
    code, _, err = interrupt(cluster, "early", [signal.SIGINT])
    assert code == Undone.exit_code
    assert err.splitlines()[-2] == "  the rank is: not touched"


def test_interrupted_move_is_reported_as_json(cluster: FakeCluster, tmp_path: Path) -> None:
    """With --json no events are printed, so the driver itself prints to stderr when it is ready."""
    program = INTERRUPTIBLE.replace(
        'self.on_event(Event("note", "", 0, 0, 0, "READY"))', 'print("READY", file=sys.stderr)'
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"MODE = 'undoes'\n{program}", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "READY\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (Undone.exit_code, "")
    assert json.loads(out)["outcome"] == "undone"
