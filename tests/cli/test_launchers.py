"""Launchers through all their processes, up to what the keeper of each worker is asked to start.

The launchers are small programs with the process structure of the real ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from migrator.cli import launchers, run, starters
from tests.cli.fake_keeper import Kept, kept

__all__ = ["kept"]  # a fixture

ROOT = Path(__file__).parents[2]

#: Replaces the keeper in every process.
KEEPER = """
import json, os, sys
if "migrator.cli" in sys.orig_argv:
    import shim.keeper.start
    def asked(argv, job, rank, sock, *, environment, preload, alone, allow_unprotected, companion, replayed):
        with open(os.environ["RANKS"], "a") as file:
            file.write(json.dumps([argv, job, rank, environment]) + "\\n")
        return 0
    shim.keeper.start.run = asked
"""

#: As deepspeed.launcher.runner and deepspeed.launcher.launch start their children on one node.
RUNNER = """
import os, subprocess, sys
def main():
    cmd = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", *sys.argv[1:]]
    sys.exit(subprocess.Popen(cmd, env=os.environ.copy()).wait())
if __name__ == "__main__":
    main()
"""
LAUNCH = """
import os, subprocess, sys
env, started = os.environ.copy(), []
for rank in range(2):
    env["RANK"] = env["LOCAL_RANK"] = str(rank)
    cmd = [sys.executable, "-u", sys.argv[2], f"--local_rank={rank}", *sys.argv[3:]]
    started.append(subprocess.Popen(cmd, env=env))
sys.exit(max(process.wait() for process in started))
"""
#: mpirun and srun: `-n N COMMAND …`, with the variable that tells a process its rank.
STARTER = """
import os, subprocess, sys
assert sys.argv[1] == "-n"
started = [subprocess.Popen(sys.argv[3:], env={**os.environ, "VARIABLE": str(rank)}) for rank in range(int(sys.argv[2]))]
sys.exit(max(process.wait() for process in started))
"""


@dataclass
class Ran:
    code: int
    err: str
    ranks: list[Any]  # arguments, job, rank and environment of each, by rank


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder for programs and modules."""
    (tmp_path / "sitecustomize.py").write_text(KEEPER)
    folder = tmp_path / "deepspeed" / "launcher"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").touch()
    (folder / "runner.py").write_text(RUNNER)
    (folder / "launch.py").write_text(LAUNCH)
    add(tmp_path, "deepspeed.program", "from deepspeed.launcher.runner import main\nmain()")
    (tmp_path / "bin").mkdir()
    (tmp_path / "deepspeed.program").rename(tmp_path / "bin" / "deepspeed")
    add(tmp_path / "bin", "mpirun", STARTER.replace("VARIABLE", "OMPI_COMM_WORLD_RANK"))
    add(tmp_path / "bin", "srun", STARTER.replace("VARIABLE", "SLURM_PROCID"))
    add(tmp_path / "bin", "none", "print('no rank')")
    return tmp_path


def add(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!{sys.executable}\n{text}\n")
    (folder / name).chmod(0o755)


def start(path: Path, *arguments: str) -> Ran:
    environment = {
        "PATH": f"{path}/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{path}:{ROOT}",
        "HOME": "/",
        "RANKS": f"{path}/ranks",
    }
    command = [sys.executable, "-m", "migrator.cli", "run", "--no-shim", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    ranks = Path(environment["RANKS"])
    lines = ranks.read_text().splitlines() if ranks.exists() else []
    return Ran(done.returncode, done.stderr, sorted(map(json.loads, lines), key=lambda rank: rank[2]))


@pytest.mark.parametrize(
    "command", [["deepspeed"], [sys.executable, "-m", "deepspeed.launcher.runner"], ["env", "A=1", "deepspeed"]]
)
def test_every_worker_of_deepspeed_is_a_rank(path: Path, command: list[str]) -> None:
    ran = start(path, "--", *command, "train.py", "--lr", "1")
    assert ran.code == 0, ran.err
    assert [(argv, job, rank) for argv, job, rank, _ in ran.ranks] == [
        ([sys.executable, "-u", "train.py", f"--local_rank={rank}", "--lr", "1"], "train", rank) for rank in range(2)
    ]
    assert not {name for *_, environment in ran.ranks for name in environment if "MIGRATOR" in name}
    assert not [name for *_, environment in ran.ranks for name in environment if name == "PYTHON_EXEC"]
    assert "warning" not in ran.err


@pytest.mark.parametrize("starter", ["mpirun", "srun"])
def test_every_command_that_mpirun_or_srun_starts_is_a_rank(path: Path, starter: str) -> None:
    ran = start(path, "--job", "night", "--", starter, "-n", "2", "python", "train.py", "-n", "3")
    assert ran.code == 0, ran.err
    assert [(argv, job, rank) for argv, job, rank, _ in ran.ranks] == [
        (["python", "train.py", "-n", "3"], "night", rank) for rank in range(2)
    ]


def test_launcher_without_a_rank_is_reported_when_it_ends(path: Path) -> None:
    ran = start(path, "--launcher", "--", "none")
    assert (ran.code, ran.ranks) == (0, [])
    # The process that warns is not the launcher, and may end after it.
    assert "warning: none has ended, and none of the processes that it started here was a rank" in ran.err


def test_launcher_without_a_rank_is_reported_while_it_runs() -> None:
    text = "import time\nfrom migrator.cli import no_ranks\nno_ranks.SLOW_S = 0.01\nno_ranks.watch('slow')\ntime.sleep(3600)"
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        try:
            assert "slow has started no rank yet" in launcher.stderr.readline()
        finally:
            launcher.kill()
        assert "slow has ended" in launcher.stderr.read()


WORDS = "python train.py -n 3"


@pytest.mark.parametrize(
    "command",
    [
        "mpirun -np 2 {}",
        "mpirun -np 2 --mca btl tcp,self -x A=1 --oversubscribe --map-by=slot {}",
        "/opt/mpi/bin/mpiexec -n 1 {} : -n 1 {}",
        "mpiexec.hydra -ppn 2 -genv A 1 -l {}",
        "srun {}",
        "srun -N2 -n 4 -lu --gres gpu:1 --mem=4G --exclusive {}",
        "srun -K1 --kill-on-bad-exit -- {}",
        "env A=1 srun -n2 {}",
    ],
)
def test_migrator_run_is_written_in_front_of_what_is_started(command: str) -> None:
    before = command.replace("{}", WORDS).split()
    assert starters.with_prefix(before, ["RUN", "--"]) == command.replace("{}", f"RUN -- {WORDS}").split()
    assert starters.commands(before) == [WORDS.split()] * command.count("{}")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("mpirun --new-option python train.py", "--new-option of mpirun is not known"),
        ("srun --multi-prog tasks.conf", "--multi-prog of srun is not known"),
        ("srun -lY python train.py", "-Y of srun is not known"),
        ("mpirun -np 2", "mpirun is given no command"),
        ("srun torchrun train.py", "srun starts another launcher"),
    ],
)
def test_starter_that_is_not_understood_is_refused(
    kept: Kept, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    """Nothing is guessed: the wrong word would be taken for the command."""
    assert run.main(["--", *command.split()]) == run.FAILED
    said = capsys.readouterr().err
    assert reason in said
    assert "… migrator run -- CMD …" in said
    assert kept.asked == []


def test_launcher_that_cannot_be_split_is_one_rank(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", "ray", "start", "--head", "--block"]
    assert run.main(command) == 7
    assert [job for _, job, *_ in kept.asked] == ["ray"]
    assert run.main(["--launcher", *command]) == run.FAILED
    assert "migrator run -- ray …" in capsys.readouterr().err


def test_program_that_leaves_its_processes_behind_is_refused(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--", "ray", "start", "--head"]) == run.FAILED
    assert "--block" in capsys.readouterr().err
    assert kept.asked == []


@pytest.mark.parametrize(
    "command", ["sbatch job.sh", "ray job submit -- python train.py", "env A=1 ssh node-2 ./train"]
)
def test_program_whose_work_is_done_elsewhere_is_started_with_a_warning(
    kept: Kept, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run.main(["--", *command.split()]) == 7
    assert "not a rank; write `migrator run --` in front of the command" in capsys.readouterr().err
    assert len(kept.asked) == 1


def test_rank_number_cannot_be_given_to_what_numbers_its_ranks(kept: Kept) -> None:
    assert run.main(["--rank", "1", "--", "mpirun", "-n", "2", "python", "train.py"]) == run.FAILED


def test_deepspeed_that_is_no_python_script_is_refused(path: Path) -> None:
    (path / "bin" / "deepspeed").write_text("#!/bin/sh\n")
    with pytest.raises(launchers.NotProtectable, match=r"python -m deepspeed\.launcher\.runner"):
        launchers.launching(["deepspeed", "x.py"], {"PATH": f"{path}/bin"})
