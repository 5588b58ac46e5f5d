"""Tests `migrator run`: job and rank, which arguments belong to the command, and which modules are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from migrator.cli import launchers, run
from migrator.cli.launchers import STORE_VARIABLE
from tests.cli.conftest import Migrator
from tests.cli.fake_keeper import Kept, kept

__all__ = ["kept"]

#: Modules that would make the start slow, or start threads in a process that forks.
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
def test_options_after_the_command_belong_to_the_command(
    kept: Kept, migrator: Migrator, argv: tuple[str, ...], command: list[str]
) -> None:
    assert migrator(*argv).code == 7
    assert [asked[0] for asked in kept.asked] == [command]


def test_keeper_gets_job_rank_socket_and_preload(
    kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ({}, "./-weird name.sh", "weird-name"),
        ({}, "x" * 300, "x" * 60),
        ({}, "übung", "bung"),
    ],
)
def test_job_is_named_after_the_launcher_or_the_command(environment: dict[str, str], command: str, job: str) -> None:
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
def test_rank_is_taken_from_the_launchers_variables(environment: dict[str, str], rank: int) -> None:
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
def test_invalid_arguments_exit_with_125(kept: Kept, migrator: Migrator, argv: tuple[str, ...]) -> None:
    ran = migrator("run", *argv)
    assert (ran.code, ran.out) == (run.FAILED, "")
    assert ran.err.startswith("migrator run: ")
    result = migrator("--json", "run", *argv)
    assert result.code == run.FAILED
    assert set(result.json) == {"error", "message", "remedy", "where"}
    assert kept.asked == []


def test_run_loads_no_heavy_module_and_starts_no_thread(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The keeper's main function is replaced by one that lists the modules loaded so far, the keeper's included."""
    program = (
        "import json, sys, threading\n"
        "import shim.keeper.start\n"
        "from migrator.cli import main\n"
        "def loaded(*_, **__):\n"
        "    print(json.dumps({'modules': sorted(sys.modules), 'threads': threading.active_count()}))\n"
        "    return 0\n"
        "shim.keeper.start.run = loaded\n"
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


# ---- launchers


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("torchrun --nnodes 2 train.py", True),
        ("/opt/env/bin/torchrun train.py --no-python", True),
        ("python -m torch.distributed.run train.py", True),
        ("python3.11 -u -X dev -m torch.distributed.launch train.py", True),
        ("/opt/env/bin/python /opt/env/bin/torchrun train.py", True),
        ("python -um torch.distributed.run train.py", True),
        ("python -mtorch.distributed.run train.py", True),
        ("env OMP_NUM_THREADS=4 nohup torchrun train.py", True),
        ("timeout -k 5 1h numactl -N 0 --membind=0 torchrun train.py", True),
        ("deepspeed --num_gpus 2 train.py --deepspeed", True),
        ("/opt/env/bin/python /opt/env/bin/deepspeed train.py", True),
        ("python -m deepspeed.launcher.runner train.py", True),
        ("accelerate launch --multi_gpu train.py", True),
        ("accelerate-launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("accelerate config", False),
        ("accelerate", False),
        ("python train.py -m torch.distributed.run", False),
        ("python -c torchrun", False),
        ("python", False),
        ("bash -c torchrun", False),
        ("mytorchrun train.py", False),
    ],
)
def test_launchers_are_recognized(command: str, is_one: bool) -> None:
    assert launchers.is_launcher(command.split()) is is_one


@pytest.mark.parametrize("option", ["--no-python", "--no_python", "--run-path"])
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launcher_option_that_bypasses_python_exec_is_refused(
    kept: Kept, migrator: Migrator, launcher: str, option: str
) -> None:
    ran = migrator("run", "--", launcher, option, "./train")
    assert ran.code == run.FAILED
    assert "migrator run --" in ran.err
    assert kept.asked == []


def test_accelerate_is_started_by_our_launch_script(tmp_path: Path) -> None:
    script = tmp_path / "accelerate"
    script.write_text("#!/opt/env/bin/python3.12\n")
    script.chmod(0o755)
    start, path = str(launchers.LAUNCH), {"PATH": str(tmp_path)}
    assert launchers.launching(["accelerate", "launch", "x.py"], path) == [
        *("/opt/env/bin/python3.12", start, str(script), "launch", "x.py")
    ]
    assert launchers.launching(["python", "-u", "-m", "accelerate.commands.launch", "x.py"], path) == [
        *("python", "-u", start, "-m", "accelerate.commands.launch", "x.py")
    ]
    assert launchers.launching(["python", "/b/accelerate", "launch", "x.py"], path) == [
        *("python", start, "/b/accelerate", "launch", "x.py")
    ]
    assert launchers.launching(["env", "A=1", "python", "-um", "accelerate.commands.launch", "x.py"], path) == [
        *("env", "A=1", "python", "-u", start, "-m", "accelerate.commands.launch", "x.py")
    ]
    script.write_text("#!/usr/bin/env python3\n")
    assert launchers.launching(["accelerate", "launch", "x.py"], path) == [
        *("python3", start, str(script), "launch", "x.py")
    ]
    script.write_text("#!/bin/sh\n")
    for unchanged in (
        ["accelerate", "launch", "x.py"],
        ["torchrun", "x.py"],
        ["python", "-m", "torch.distributed.run"],
    ):
        assert launchers.launching(unchanged, path) == unchanged


def test_invalid_options_with_a_launcher_are_refused(kept: Kept, migrator: Migrator) -> None:
    assert migrator("run", "--rank", "1", "--", "torchrun", "train.py").code == run.FAILED
    assert migrator("run", "--job", "a/b", "--", "torchrun", "train.py").code == run.FAILED
    assert migrator("run", "--launcher", "--", "/nowhere/start.sh").code == 127


def test_worker_gets_the_environment_that_its_launcher_gave(tmp_path: Path) -> None:
    """Checks the path from `migrator run` through a fake torchrun to what the worker's keeper is asked to start."""
    root = Path(__file__).parents[2]
    shown = (
        "import json, os, sys; import shim.keeper.start\n"
        "def asked(argv, job, rank, sock, *, environment, preload, alone, allow_unprotected, companion, replayed):\n"
        "    print(json.dumps([argv, job, rank, preload is not None, environment]))\n"
        "    return 0\n"
        "shim.keeper.start.run = asked\n"
    )
    (tmp_path / "sitecustomize.py").write_text(shown)
    agent = tmp_path / "torchrun"
    agent.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys\n"
        "sys.exit(subprocess.call([os.environ['PYTHON_EXEC'], '-u', 'train.py', '--job'], env={**os.environ, 'RANK': '3'}))\n"
    )
    agent.chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{root}", "HOME": "/"}
    for more, python, rest in (
        ({}, sys.executable, {}),
        ({"PYTHON_EXEC": "/opt/python"}, "/opt/python", {"PYTHON_EXEC": "/opt/python"}),
        ({STORE_VARIABLE: "0"}, sys.executable, {STORE_VARIABLE: "0"}),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "migrator.cli", "run", "--job", "night", "--no-shim", "--", "torchrun", "x"],
            env={**given, **more},
            capture_output=True,
            text=True,
            cwd=root,
        )
        assert done.returncode == 0, done.stderr
        argv, job, rank, preload, environment = json.loads(done.stdout)
        assert (argv, job, rank, preload) == ([python, "-u", "train.py", "--job"], "night", 3, False)
        assert {
            name: value for name, value in environment.items() if name not in ("LC_CTYPE", "PWD", "SHLVL", "_")
        } == {
            **given,
            "RANK": "3",
            **rest,
        }


def test_unreadable_installation_is_reported(kept: Kept, migrator: Migrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    failed = migrator("run", "--", "true")
    assert failed.code == run.FAILED
    assert "cannot read the installation in" in failed.err
    assert "no rank was started" in failed.err
