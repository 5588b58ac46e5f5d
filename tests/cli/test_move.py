"""Tests `migrator move`: the progress display, the report of each outcome, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from migrator.progress_display import Lines, Live, Silent, show_on
from migrator.protocol import Verdict
from migrator.results import Event, MoveOptions, MoveResult, PhaseTime
from snapshotd import __version__
from snapshotd.api.errors import CriuFailed, OutcomeUnknown, Refused, Undone, Where
from tests.cli.conftest import MOVE, FakeCluster, Migrator, a_rank

ROOT = Path(__file__).parents[2]


def moved(**fields: Any) -> MoveResult:
    given: dict[str, Any] = {
        "move": MOVE,
        "job": "train",
        "rank": 1,
        "source": "node-2",
        "target": "spare-1",
        "outcome": Verdict.MOVED,
        "pause_s": 0.93,
        "bytes": 2_000_000_000,
        "phases": [
            PhaseTime("preflight", 0.1, 0),
            PhaseTime("stream", 1.0, 2_000_000_000),
            PhaseTime("clean", 0.05, 0),
        ],
        "where": Where.TARGET_RUNNING,
    }
    return MoveResult(**(given | fields))


def failed(error: Undone | Refused | OutcomeUnknown, outcome: Verdict, where: Where) -> MoveResult:
    return moved(
        outcome=outcome,
        where=where,
        reason=error.message,
        remedy=error.advice,
        error_code=error.code,
        exit_code=error.exit_code,
    )


@pytest.fixture
def drive(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[MoveResult], list[MoveOptions]]:
    """Replaces the driver by one whose move ends with the given result, after some events."""

    def ends_with(result: MoveResult) -> list[MoveOptions]:
        asked: list[MoveOptions] = []

        class Driver:
            def __init__(self, _: object, on_event: Callable[[Event], None]) -> None:
                self.on_event = on_event

            async def move(self, ask: MoveOptions) -> MoveResult:
                asked.append(ask)
                for phase in result.phases:
                    self.on_event(Event("phase-start", phase.name, 0, 0, 0, ""))
                    self.on_event(Event("phase-end", phase.name, phase.seconds, phase.bytes, 0, ""))
                return result

        monkeypatch.setattr("migrator.driver.Driver", Driver)
        return asked

    return ends_with


def test_successful_move_prints_pause_and_phases(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    asked = drive(moved())
    ran = migrator("move", "--rank", "1", "--to", "spare-1", "--job", "train", "--timeout", "60")
    assert ran.code == 0
    assert asked == [MoveOptions(1, "spare-1", "train", 60.0)]
    assert ran.out.splitlines() == [
        "moved rank 1  node-2 → spare-1  pause 0.9 s",
        "  preflight 0.10  stream 1.00  clean 0.05  (seconds)",
        "  longest: stream 1.0 s at 2.00 GB/s; 2.0 GB sent",
    ]
    assert ran.err.splitlines() == [
        "  preflight  0.1 s",
        "  stream     1.0 s  2.0 GB  2.00 GB/s",
        "  clean      0.05 s",
    ]


def test_json_output_is_exactly_one_object(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    drive(moved())
    ran = migrator("move", "--rank", "1", "--to", "spare-1", "--json")
    assert (ran.code, ran.err) == (0, "")
    wanted = {"move", "job", "rank", "source", "target", "outcome", "pause_s", "bytes", "phases", "reason"}
    assert wanted <= set(ran.json)
    assert ran.json["outcome"] == "moved"
    assert ran.json["phases"][1] == {"name": "stream", "seconds": 1.0, "bytes": 2_000_000_000}


WHOLE = ["Prepare", "Begin", "PrepareDevice", "Freeze", "Stream", "Restore", "Commit", "Activate", "Release"]


def test_move_of_a_gpu_rank_prints_the_parts_of_the_pause(
    drive: Callable[[MoveResult], list[MoveOptions]], migrator: Migrator
) -> None:
    parts = [PhaseTime("prepare", 9.0, 0), PhaseTime("offload", 0.5, 25_000_000_000), PhaseTime("refill", 0.8, 25)]
    result = moved(device_bytes=25_000_000_000, parts=parts, longest_part=parts[2])
    drive(result)
    lines = migrator("move", "--rank", "1", "--to", "spare-1").out.splitlines()
    assert [line for line in lines if line.startswith("    ")] == [
        "    PART       TIME     SIZE        RATE",
        "    prepare  9.00 s",
        "    offload  0.50 s  25.0 GB  50.00 GB/s",
        "    refill   0.80 s     25 B   0.00 GB/s",
    ]
    assert any(line.strip().startswith("longest: refill") for line in lines), lines
    drive(result)
    answer = json.loads(migrator("move", "--rank", "1", "--to", "spare-1", "--json").out)
    assert answer["longest_part"] == {"name": "refill", "seconds": 0.8, "bytes": 25}


def test_driver_completes_a_move(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert ran.code == 0
    assert (ran.json["outcome"], ran.json["source"], ran.json["bytes"]) == ("moved", "node-1", 2_500_000)
    assert cluster["node-1"].called(*WHOLE) == ["Begin", "PrepareDevice", "Freeze", "Stream", "Commit", "Release"]
    assert cluster["spare-1"].called(*WHOLE) == ["Prepare", "Restore", "Activate"]
    assert ran.json["parts"][0] == {"name": "prepare", "seconds": 9.0, "bytes": 0}
    assert ran.json["longest_part"]["name"] != "prepare", "the job ran meanwhile"


def test_source_without_prepare_device_can_still_move_a_rank(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].unknown.add("PrepareDevice")
    cluster["node-1"].ranks = [a_rank("node-1")]
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "moved")
    assert "prepare" not in {part["name"] for part in ran.json["parts"]}


@pytest.mark.parametrize("verb", ["move", "check"])
@pytest.mark.parametrize("node", ["node-1", "spare-1"])
def test_daemon_of_another_version_is_refused_before_any_other_call(
    cluster: FakeCluster, migrator: Migrator, verb: str, node: str
) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster[node].version = "0.1.0"
    ran = migrator(verb, "--rank", "0", "--to", "spare-1")
    assert ran.code == Refused.exit_code
    assert f"daemon-version: snapshotd on {node} has version 0.1.0, and this migrator {__version__}" in ran.err
    assert "install the same version" in ran.err
    assert {method for method, _ in cluster[node].asked} == {"GetNode", "ListRanks"}


def test_patch_versions_of_daemons_may_differ(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].version = __version__.rpartition(".")[0] + ".999"
    assert migrator("move", "--rank", "0", "--to", "spare-1").code == 0


def test_driver_undoes_a_move_that_fails(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].failures["Restore"] = CriuFailed(
        "Error (criu/x.c:1): no\nsecond line", where=Where.SOURCE_FROZEN
    )
    ran = migrator("move", "--rank", "0", "--to", "spare-1")
    assert ran.code == Undone.exit_code
    assert "migrator: rank 0 was not moved: undone: Error (criu/x.c:1): no\nsecond line\n" in ran.err
    assert "\n  the rank is: running on source (node-1)\n  remedy: " in ran.err
    assert cluster["node-1"].called("Abort")
    assert cluster["spare-1"].called("Discard")
    assert not cluster["spare-1"].called("Activate")


LATE = Refused("nccl: communicator 01 has a symmetric-memory window", remedy="destroy the window")


@pytest.mark.parametrize("step", ["Begin", "Freeze"])
def test_refusal_after_the_first_preparing_step_is_undone(cluster: FakeCluster, migrator: Migrator, step: str) -> None:
    """Exit code 10 promises that nothing was paused. A late refusal names its check and reports the pause of the job."""
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["node-1"].failures[step] = LATE
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["error"]) == (Undone.exit_code, "undone", "refused")
    assert ran.json["reason"].startswith(LATE.message)
    assert (ran.json["remedy"], ran.json["where"]) == (LATE.advice, Where.SOURCE_RUNNING)
    assert ("; the job was paused for 0." in ran.json["reason"]) == (step == "Freeze") == (ran.json["pause_s"] > 0)
    assert cluster["node-1"].called("Abort")
    assert cluster["spare-1"].called("Discard")


def test_refusal_by_the_first_preparing_step_is_refused(cluster: FakeCluster, migrator: Migrator) -> None:
    cluster["node-1"].ranks = [a_rank("node-1")]
    cluster["spare-1"].failures["Prepare"] = Refused("gpu: no free GPU of this kind")
    ran = migrator("move", "--rank", "0", "--to", "spare-1", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["pause_s"]) == (Refused.exit_code, "refused", 0)
    assert not cluster["node-1"].called("Begin")


ENDS = [
    (Refused("2 checks refuse"), Verdict.REFUSED, Where.SOURCE_RUNNING, "running on source (node-2)"),
    (Undone("the target is full"), Verdict.UNDONE, Where.SOURCE_RUNNING, "running on source (node-2)"),
    (OutcomeUnknown("no answer"), Verdict.UNKNOWN, Where.TARGET_HELD, "held on target (spare-1)"),
]


@pytest.mark.parametrize(("error", "outcome", "where", "shown"), ENDS, ids=[str(end[1]) for end in ENDS])
def test_failed_move_prints_reason_place_of_the_rank_and_remedy(
    drive: Callable[[MoveResult], list[MoveOptions]],
    migrator: Migrator,
    error: Undone | Refused | OutcomeUnknown,
    outcome: Verdict,
    where: Where,
    shown: str,
) -> None:
    drive(failed(error, outcome, where))
    ran = migrator("move", "--rank", "1", "--to", "spare-1")
    assert ran.code == error.exit_code
    assert ran.out == ""
    reply = ran.err.splitlines()[-3:]
    assert reply[0].startswith("migrator: ")
    assert f"{outcome}: {error.message}" in reply[0]
    assert reply[1:] == [f"  the rank is: {shown}", f"  remedy: {error.advice}"]
    as_json = migrator("move", "--rank", "1", "--to", "spare-1", "--json")
    assert (as_json.code, as_json.json["outcome"], as_json.json["where"]) == (error.exit_code, outcome, where)


# -------------------------------------------------------------------- the display


def event(kind: str, phase: str = "", seconds: float = 0, count: int = 0, expected: int = 0, text: str = "") -> Event:
    return Event(kind, phase, seconds, count, expected, text)


def test_plain_lines_report_a_stream_at_most_every_two_seconds() -> None:
    clock = [0.0]
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: clock[0])
    lines(event("phase-start", "stream"))
    for tick in range(1, 46):
        clock[0] = tick / 10
        lines(event("bytes", "stream", count=tick * 100_000_000, expected=8_000_000_000))
    lines(event("phase-end", "stream", 4.5, 4_500_000_000))
    lines.close()
    lines.close()
    assert stream.getvalue().splitlines() == [
        "  stream     2.0 GB of up to 8.0 GB  1.00 GB/s",
        "  stream     4.0 GB of up to 8.0 GB  1.00 GB/s",
        "  stream     4.5 s  4.5 GB  1.00 GB/s",
    ]


def test_phase_of_two_steps_is_one_line() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for phase in ("prepare", "prepare", "freeze"):
        lines(event("phase-start", phase))
        lines(event("phase-end", phase, 0.2))
    lines(event("note", text="hello\x1b[2J"))
    lines.close()
    assert stream.getvalue().splitlines() == ["  prepare    0.4 s", "  hello?[2J", "  freeze     0.2 s"]


def test_closed_output_stream_is_ignored() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    closed = io.StringIO()
    closed.close()
    for stream in (broken, closed):
        lines = Lines(stream)
        lines(event("phase-start", "freeze"))
        lines(event("phase-end", "freeze", 0.1))
        lines.close()
    with pytest.raises(BrokenPipeError):
        broken.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_is_live_on_a_terminal_and_absent_for_json() -> None:
    assert isinstance(show_on(io.StringIO()), Lines)
    assert isinstance(show_on(io.StringIO(), only_live=True), Silent)
    stream = Terminal()
    live = show_on(stream)
    assert isinstance(live, Live)
    for phase in ("prepare", "prepare", "stream"):
        live(event("phase-start", phase))
        live(event("bytes", phase, count=1_000_000_000 * (phase == "stream"), expected=4_000_000_000))
        live(event("phase-end", phase, 0.5, 3_000_000_000 * (phase == "stream")))
    live(event("note", text="a note [red]"))
    live.close()
    live.close()
    shown = stream.getvalue()
    assert "3.0 GB  6.00 GB/s" in shown
    assert "1.0 s" in shown  # both steps of prepare
    assert "a note [red]" in shown


# -------------------------------------------------------------------- Ctrl-C

#: Like the real driver, this one is cancelled once and then takes its time. It announces every step on stderr.
INTERRUPTIBLE = """
import asyncio, sys
import migrator.driver
from migrator.protocol import Verdict
from migrator.results import Event, MoveResult
from snapshotd.api.errors import Undone, Where
from migrator.cli import main

class Driver:
    def __init__(self, cluster, on_event):
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
