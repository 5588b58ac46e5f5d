"""The chaos runner (integration/chaos) notices what it looks for, and draws everything from its seed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from integration.chaos import __main__ as main
from integration.chaos import kinds, labs, processes
from integration.chaos.jobs import ALL_KINDS, Broken, Ledger
from integration.chaos.losses import LOSSES, NCCL_POINTS, Stage, draw_loss, draw_moment
from integration.chaos.protected import NODES, ProtectedChaos
from integration.chaos.protected_jobs import RepeatedLedger
from integration.chaos.report import Entry, Report
from integration.chaos.rounds import Chaos
from integration.chaos.soak import WARM_UP, WINDOW, Samples, Soak


def test_ledger_notices_a_step_made_twice_and_one_left_out(tmp_path: Path) -> None:
    for wrong in ("1\n", "3\n", "x\n"):
        ledger = Ledger(tmp_path / "ledger")
        ledger.path.write_text("0\n1")
        ledger.read()
        assert ledger.steps == 1  # the second line is not complete
        with ledger.path.open("a") as file:
            file.write("\n")
        ledger.read()
        assert ledger.steps == 2
        with ledger.path.open("a") as file:
            file.write(wrong)
        with pytest.raises(Broken, match="after 2 steps"):
            ledger.read()


def test_a_seed_draws_the_same_faults_and_all_kinds() -> None:
    drawn = []
    for _ in range(2):
        found = []
        for number in range(400):
            job: Any = SimpleNamespace(kind=("single", "gloo")[number % 2], ranks=[None] * (1 + number % 2))
            found.append(kinds.draw(Random(f"7/{number}"), job))
        drawn.append([(fault.kind, fault.words) for fault in found])
    assert drawn[0] == drawn[1]
    assert {kind for kind, _ in drawn[0]} == set(kinds.KINDS)


def test_ledger_of_a_job_that_is_rolled_back_notices_other_losses_and_a_second_copy(tmp_path: Path) -> None:
    for wrong, why in (("1 0.9\n", "gave 0.9, and 0.5 before"), ("4 0.1\n", "instead of 3"), ("x\n", "instead of 3")):
        ledger = RepeatedLedger(tmp_path / "ledger")
        ledger.path.write_text("0 0.7\n1 0.5\n2 0.3\n1 0.5\n2 0.3\n")
        ledger.read()
        assert ledger.steps == 3
        with ledger.path.open("a") as file:
            file.write(wrong)
        with pytest.raises(Broken, match=why):
            ledger.read()
    ledger = RepeatedLedger(tmp_path / "ledger")
    ledger.path.write_text("0 0.7\n1 0.5\n2 0.3\n0 0.7\n3 0.2\n")
    with pytest.raises(Broken, match="instead of 1 or an earlier one"):
        ledger.read()


def test_a_seed_draws_the_same_losses_of_all_kinds_at_moments_of_all_kinds() -> None:
    drawn, places = [], ["node-1", "node-2", "node-2"]
    stage = Stage(NODES, places, places, "node-1", nccl=True)
    for _ in range(2):
        found = []
        for number in range(400):
            random = Random(f"7/{number}")
            moment = draw_moment(random, stage, 3.0)
            found.append((moment, draw_loss(random, stage, moment)))
        drawn.append([(moment, loss.kind, loss.words, loss.down_s) for moment, loss in found])
    assert drawn[0] == drawn[1]
    assert {kind for _, kind, _, _ in drawn[0]} == set(LOSSES)
    assert {moment.during for moment, _, _, _ in drawn[0]} == {"", "snapshot", "rollback"}
    assert all(moment.node in {"", "node-1", "node-2"} for moment, _, _, _ in drawn[0])
    points = {point for during in NCCL_POINTS.values() for listed in during.values() for point in listed}
    assert points <= {moment.point for moment, _, _, _ in drawn[0]}


def test_hint_how_to_repeat_rounds_of_rollback_has_their_options(tmp_path: Path) -> None:
    nodes: Any = SimpleNamespace(folder=tmp_path)
    assert ProtectedChaos(nodes, 7, print).report.repeat() == 'make chaos SEED=7 CHAOS="--rollback"'
    chosen = ProtectedChaos(nodes, 7, print, ["nccl"], None, ["node-off"]).report.repeat()
    assert chosen == 'make chaos SEED=7 CHAOS="--rollback --jobs nccl --faults node-off"'


def test_hint_how_to_repeat_a_run_has_its_options(tmp_path: Path) -> None:
    nodes: Any = SimpleNamespace(folder=tmp_path)
    hint = Chaos(nodes, 7, print, ["single", "gloo"], faults=["two"]).report.repeat()
    assert hint == 'make chaos SEED=7 CHAOS="--jobs single --jobs gloo --faults two"'
    fewer = [kind for kind in kinds.KINDS if kind != "node-crash"]
    assert (
        Chaos(nodes, 7, print, ALL_KINDS, None, fewer).report.repeat()
        == 'make chaos SEED=7 CHAOS="--without node-crash"'
    )
    assert Chaos(nodes, 7, print, ALL_KINDS).report.repeat() == "make chaos SEED=7"


def test_table_has_the_settle_times_of_each_kind() -> None:
    report = Report(7)
    for number, (kind, settle_s) in enumerate([("two", 1.0), ("two", 9.0), ("two", 2.0), ("none", 0.5)]):
        report.add(Entry(number, kind, "words", "gloo", "undone" if settle_s > 5 else "moved", 1.0, settle_s, 0))
    rows = {line.split()[0]: line.split() for line in report.table().splitlines()}
    assert rows["two"] == ["two", "3", "2.0", "9.0", "0", "moved", "2,", "undone", "1"]
    assert rows["none"][:4] == ["none", "1", "0.5", "0.5"]
    assert rows["all"][1] == "4"
    assert "seed 7, 4 rounds" in report.table()


@pytest.mark.parametrize(
    ("descriptors", "memory", "grown"), [(0, 0, 0), (1, 0, 1), (0, 4, 0), (0, 6, 1), (2, 20, 2), (-3, -5, 0)]
)
def test_soak_notices_growth_after_the_first_moves(descriptors: int, memory: int, grown: int) -> None:
    nodes: Any = SimpleNamespace(lab=SimpleNamespace(nodes=("node-1",)))
    soak = Soak(nodes, 7, print)
    early = WARM_UP + WINDOW
    soak.samples["node-1"] = Samples(
        [20] * early + [20 + descriptors] * WINDOW,
        [(700, 200, 100)] * early + [(700 + 10 * memory, 200, 100)] * WINDOW,
        [3] * (early + WINDOW),
    )
    assert len(soak.growth()) == grown
    assert ("nothing has grown" in soak.table()) == (grown == 0)


def test_soak_notices_more_children_but_not_their_memory() -> None:
    nodes: Any = SimpleNamespace(lab=SimpleNamespace(nodes=("node-1",)))
    soak = Soak(nodes, 7, print)
    moves = WARM_UP + 2 * WINDOW
    soak.samples["node-1"] = Samples(
        [20] * moves, [(700, 200, 100)] * (moves - WINDOW) + [(700, 200, 900)] * WINDOW, [3] * moves
    )
    assert soak.growth() == []
    soak.samples["node-1"].children[-WINDOW:] = [4] * WINDOW
    assert soak.growth() == ["other children of node-1: at most 3 at first, at least 4 at the end"]


def test_children_of_all_threads_are_found() -> None:
    """The daemon starts most of its children in threads."""
    started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
    done = threading.Event()

    def start() -> None:
        started.put(subprocess.Popen(["sleep", "600"]))
        done.wait()

    thread = threading.Thread(target=start)
    thread.start()
    with started.get() as child:
        try:
            assert child.pid in processes.children(os.getpid())
        finally:
            child.kill()
            done.set()
            thread.join()


# ---------------------------------------------------------------- several labs at a time

#: A lab that has made one round, and another one when it is interrupted.
LAB = """
import json, signal, sys, time
seed, broken, lasts = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "lasts"
rounds = [dict(number=1, kind="k", fault="f", job="j", outcome="o", move_s=1.0, settle_s=float(seed), recovers=0)]
def end(*_):
    print(json.dumps(dict(seed=seed, seconds=1, broken=broken, scans=3, longest_gap_s=0.5, rounds=rounds)), flush=True)
    sys.exit(1 if broken else 0)
signal.signal(signal.SIGINT, end)
print("round 1: f: o, new steps after 1 s", file=sys.stderr, flush=True)
if sys.argv[3] == "dies":
    sys.exit("no room")
time.sleep(100 if lasts else 0)
end()
"""


def _labs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *runs: tuple[str, str]) -> list[str]:
    """Lets labs be such processes; what is said."""

    def start(number: int, _arguments: object, seed: int) -> labs.LabRun:
        said, report = tmp_path / f"{seed}.log", tmp_path / f"{seed}.json"
        with said.open("wb") as errors, report.open("wb") as out:
            process = subprocess.Popen([sys.executable, "-c", LAB, str(seed), *runs[number]], stdout=out, stderr=errors)
        lab = labs.LabRun(seed, process, said, report)
        while not lab.rounds():
            time.sleep(0.01)
        return lab

    monkeypatch.setattr(labs, "_start", start)
    return []


def test_labs_have_one_report_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = _labs(monkeypatch, tmp_path, ("", ""), ("it ran twice", ""))
    code, reports = labs.run(2, [], 40, 1.0, said.append)
    assert code == 1
    assert [lab["seed"] for lab in reports["labs"]] == [40, 41]
    assert any(line.startswith("BROKEN, seed 41: it ran twice") for line in said), said
    assert "seed 40, 2 rounds" in said[-1]
    assert "6 scans" in said[-1]


def test_lab_that_does_not_end_is_interrupted_and_its_rounds_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(labs, "ENDS_S", 0.0)
    said = _labs(monkeypatch, tmp_path, ("", "lasts"), ("", ""))
    code, _ = labs.run(2, [], 40, 0.0, said.append)
    assert code == 0
    assert "seed 40, 2 rounds" in said[-1]


def test_lab_without_a_report_counts_as_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = _labs(monkeypatch, tmp_path, ("", "dies"))
    code, _ = labs.run(1, [], 40, 1.0, said.append)
    assert code == 1
    assert "there is no report (exit 1): no room" in said[0]


def test_labs_get_the_arguments_without_their_number_and_seed() -> None:
    given = ["--rollback", "--labs", "7", "--seed=3", "--minutes", "2", "--json", "--jobs", "nccl"]
    assert main._of_one_lab(given) == ["--rollback", "--minutes", "2", "--jobs", "nccl"]
