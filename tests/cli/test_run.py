"""`migrator run`: whose rank it is, what belongs to the command, and how little is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from migrator.cli import run
from tests.cli.conftest import Migrator

#: What would make a start slow, or start threads in a process that forks.
HEAVY = (
    "grpc",
    "google",
    "rich",
    "cryptography",
    "pyroute2",
    "asyncio",
    "tenacity",
    "xxhash",
    "snapshotd",
    "migrator.cluster",
)


class Kept:
    """Stands in for the keeper: remembers what it was asked to start."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str, int, str, bool]] = []

    def run(
        self, argv: list[str], job: str, rank: int, keeper_sock: str, *, environment: Mapping[str, str], preload: bool
    ) -> int:
        self.asked.append((argv, job, rank, keeper_sock, preload))
        self.environment = dict(environment)
        return 7


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    for name in (
        *run.RANK_VARIABLES,
        "SLURM_JOB_ID",
        "SLURM_JOB_NAME",
        "TORCHELASTIC_RUN_ID",
        "SNAPSHOTD_KEEPER_SOCKET",
        "MIGRATOR_JOB",
        "PYTHON_EXEC",
    ):
        monkeypatch.delenv(name, raising=False)
    stand_in = Kept()
    monkeypatch.setattr("shim.keeper.run", stand_in.run)
    return stand_in


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (("run", "--", "python", "x.py"), ["python", "x.py"]),
        (("run", "python", "x.py"), ["python", "x.py"]),
        (("run", "--", "cmd", "--json", "--help"), ["cmd", "--json", "--help"]),
        (("run", "cmd", "--json", "--help"), ["cmd", "--json", "--help"]),
        (("run", "cmd", "--", "--job", "x"), ["cmd", "--", "--job", "x"]),
        (("run", "--", "--", "cmd"), ["--", "cmd"]),
        (("--json", "run", "--no-shim", "cmd"), ["cmd"]),
        (("--cluster", "x", "run", "--", "run"), ["run"]),
        (("run", "--", ""), [""]),
    ],
)
def test_what_belongs_to_the_command(kept: Kept, migrator: Migrator, argv: tuple[str, ...], command: list[str]) -> None:
    assert migrator(*argv).code == 7
    assert [asked[0] for asked in kept.asked] == [command]


def test_what_the_keeper_is_told(kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch) -> None:
    migrator("run", "--job", "night", "--rank", "3", "--no-shim", "--", "cmd")
    monkeypatch.setenv("SNAPSHOTD_KEEPER_SOCKET", "/elsewhere.sock")
    migrator("run", "--job=night", "--rank=0", "cmd")
    assert kept.asked == [
        (["cmd"], "night", 3, "/run/snapshotd/keeper.sock", False),
        (["cmd"], "night", 0, "/elsewhere.sock", True),
    ]


@pytest.mark.parametrize(
    ("environment", "command", "job"),
    [
        ({}, "/usr/bin/python3", "python3"),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "night run"}, "cmd", "night-run-77"),
        ({"SLURM_JOB_ID": "77"}, "cmd", "slurm-77"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "cmd", "abc"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "cmd", "cmd"),
        ({"MIGRATOR_JOB": "mine", "SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "abc"}, "cmd", "mine"),
        ({"MIGRATOR_JOB": ""}, "cmd", "cmd"),
        ({}, "../..", "job"),
        ({}, "/", "job"),
        ({}, "./-weird name.sh", "weird-name.sh"),
        ({}, "x" * 300, "x" * 60),
        ({}, "übung", "bung"),
    ],
)
def test_the_name_of_the_job(environment: dict[str, str], command: str, job: str) -> None:
    assert run.job_name(None, [command], environment) == job


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "4", "SLURM_PROCID": "9"}, 4),
        ({"SLURM_PROCID": "9", "PMI_RANK": "2"}, 9),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"PMI_RANK": "2"}, 2),
        ({"RANK": "captain", "PMI_RANK": "2"}, 2),
        ({"RANK": "-1"}, 0),
        ({"RANK": "9" * 40}, 0),
    ],
)
def test_the_number_of_the_rank(environment: dict[str, str], rank: int) -> None:
    assert run.rank_number(None, environment) == rank


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--",),
        ("--job", "a/b", "--", "cmd"),
        ("--job", "", "--", "cmd"),
        ("--job", "../x", "--", "cmd"),
        ("--rank", "-1", "--", "cmd"),
        ("--rank", "x", "--", "cmd"),
        ("--fast", "--", "cmd"),
        ("--job",),
    ],
)
def test_our_own_errors_are_125(kept: Kept, migrator: Migrator, argv: tuple[str, ...]) -> None:
    ran = migrator("run", *argv)
    assert (ran.code, ran.out) == (run.FAILED, "")
    assert ran.err.startswith("migrator run: ")
    told = migrator("--json", "run", *argv)
    assert told.code == run.FAILED
    assert set(told.json) == {"error", "message", "remedy", "where"}
    assert kept.asked == []


def test_nothing_heavy_is_loaded_and_how_long_a_start_takes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The keeper is replaced by a listing of what is loaded by then, keeper included."""
    program = (
        "import json, sys, threading\n"
        "import shim.keeper\n"
        "from migrator.cli import main\n"
        "def loaded(*_, **__):\n"
        "    print(json.dumps({'modules': sorted(sys.modules), 'threads': threading.active_count()}))\n"
        "    return 0\n"
        "shim.keeper.run = loaded\n"
        "sys.exit(main(['run', '--job', 'x', '--', 'true']))\n"
    )
    script = tmp_path / "loaded.py"
    script.write_text(program)
    root = Path(__file__).parents[2]
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    record_property("start_s", time.monotonic() - began)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    heavy = [name for name in answer["modules"] if any(name == top or name.startswith(f"{top}.") for top in HEAVY)]
    assert heavy == []
    assert answer["threads"] == 1
