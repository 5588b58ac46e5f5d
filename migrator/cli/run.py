"""`migrator run`: starts a command as a protected rank. This process becomes its keeper.

Invariant: the standard library alone, and little of it: this runs in front of every rank of every job. Errors of our
own exit 125, so that they are not taken for the command's; 126 and 127 mean what they mean in a shell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from migrator.cli import launchers

FAILED = 125
KEEPER_SOCKET = "/run/snapshotd/keeper.sock"
MAX_RANK = 1 << 24
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WITH_VALUE = ("--job", "--rank", "--device-memory", "--cluster", "--lab")

_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")

SUMMARY = "start a command as a rank that can be moved"
EXAMPLES = f"""\
examples:
  migrator run -- python train.py
  migrator run --job night --rank 3 -- python train.py --lr 0.1
  srun migrator run -- python train.py                  job and rank come from Slurm
  migrator run -- torchrun --nnodes 4 … train.py        every worker is a rank; python -m torch.distributed.run too
  migrator run -- accelerate launch … train.py
  migrator run --launcher -- ./start.sh                 what it starts with torchrun are the ranks, not itself

The job's name defaults to $MIGRATOR_JOB, Slurm's or torchrun's, else to the command's; the rank to $RANK, $SLURM_PROCID,
$OMPI_COMM_WORLD_RANK or $PMI_RANK, else 0. The daemon is found at $SNAPSHOTD_KEEPER_SOCKET, else at
/run/snapshotd/keeper.sock.

Unless they are set, the command gets NCCL_RAS_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0, without which NCCL keeps
things open that cannot move, and {launchers.DEVICE_MEMORY_VARIABLE}={launchers.DEVICE_MEMORY_DEFAULT}; not with --no-shim.

exit codes: the command's own, wherever it ran (it dies of the same signal, too);
  125  it could not be started as a rank      126  it cannot be executed      127  it was not found
"""


class _Wrong(Exception):
    """What was asked for cannot be done."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Wrong(f"{message}; see migrator run --help")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="migrator run",
        usage="migrator run [--job NAME] [--rank N | --launcher] [--device-memory driver|offload] [--no-shim] [--json]"
        " -- CMD …",
        description=SUMMARY,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--job", metavar="NAME", help="the name of the job the rank belongs to")
    made.add_argument("--rank", metavar="N", help="the number of the rank in its job")
    made.add_argument("--launcher", action="store_true", help="CMD is no rank: what it starts with $PYTHON_EXEC is")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # from shim/keeper/worker-python
    made.add_argument(
        "--device-memory",
        choices=launchers.DEVICE_MEMORY_CHOICES,
        help="who moves what it has on the GPU: the driver's checkpoint, or the shim, at the speed of the bus "
        f"(default: ${launchers.DEVICE_MEMORY_VARIABLE}, else {launchers.DEVICE_MEMORY_DEFAULT})",
    )
    made.add_argument("--no-shim", action="store_true", help="preload no library of ours (libsnapshim*.so)")
    made.add_argument("--json", action="store_true", help="print our own errors as JSON; the command is not affected")
    made.add_argument("--cluster", "--lab", help=argparse.SUPPRESS)  # for every verb; a rank needs its own node alone
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD …", help="the command and its arguments")
    return made


def main(arguments: Sequence[str], given: int = 0) -> int:
    """`arguments` without the verb; the first `given` of them stood before it. Returns the rank's exit code."""
    own, command = _split(arguments, given)
    try:
        options = parser().parse_args(own)
        command = [*options.command, *command]
        _check_installation()
        if not command:
            raise _Wrong("no command was given; write it after --: migrator run -- CMD …")
        environment = dict(os.environ)
        if options.worker:
            command = [launchers.worker_python(environment, os.getppid()), *command]
        elif options.launcher or launchers.is_launcher(command):
            return _launch(command, options)
        job = job_name(options.job, command, environment)
        rank = rank_number(options.rank, environment)
        socket = environment.get("SNAPSHOTD_KEEPER_SOCKET") or KEEPER_SOCKET
        preload = not options.no_shim
        if options.worker:
            preload = launchers.SHIMLESS not in environment
            environment = launchers.worker_environment(environment)
        if preload:
            environment = launchers.rank_environment(environment, options.device_memory)
        from shim.keeper import home

        return home.run(command, job, rank, socket, environment=environment, preload=preload)
    except (_Wrong, launchers.NotProtectable) as error:
        return _fail(str(error), as_json="--json" in own)
    except OSError as error:
        return _fail(f"cannot start the rank: {error}", as_json="--json" in own)


def _check_installation() -> None:
    """A user who cannot read it would get a traceback of Python, or a rank without the library."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not os.access(os.path.join(root, "shim", "keeper", "home.py"), os.R_OK):
        raise _Wrong(
            f"user {os.geteuid()} cannot read the installation in {root}; no rank was started. Install it where every user"
            " can read it (a directory below /root is closed to others), or open the path to it with `chmod o+rx`"
        )


def _launch(command: Sequence[str], options: argparse.Namespace) -> int:
    """Becomes the launcher, whose workers come back to us one by one."""
    if options.rank is not None:
        raise _Wrong("the ranks are numbered by the launcher: --rank is for a command that is a rank itself")
    job = job_name(options.job, command, os.environ) if options.job is not None else None
    environment = launchers.launcher_environment(
        os.environ, sys.executable, job, not options.no_shim, options.device_memory
    )
    command = launchers.launching(command, environment)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        print(f"migrator run: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if missing else 126


def _split(arguments: Sequence[str], given: int) -> tuple[list[str], list[str]]:
    """Our own options, and the command behind `--`, of which nothing is ever taken for ours."""
    words = list(arguments)
    for index in range(given, len(words)):
        if words[index] == "--":
            return words[:index], words[index + 1 :]
        if not words[index].startswith("-") and words[index - 1] not in _WITH_VALUE:
            return words[:index], words[index:]  # `migrator run CMD …`: a later `--` is the command's own
    return words, []


def job_name(asked: str | None, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The job's name: as asked, or as the launcher calls it, or as the command does."""
    asked = environment.get(launchers.JOB) or None if asked is None else asked
    if asked is not None:
        if not _JOB.fullmatch(asked):
            raise _Wrong(f"{asked!r} cannot be the name of a job: use letters, digits, '_', '.', '-', at most 60")
        return asked
    elastic = environment.get("TORCHELASTIC_RUN_ID", "")
    if environment.get("SLURM_JOB_ID"):
        found = f"{environment.get('SLURM_JOB_NAME') or 'slurm'}-{environment['SLURM_JOB_ID']}"
    elif elastic and elastic != "none":  # what torchrun calls every job that was given no id
        found = elastic
    else:
        found = os.path.basename(command[0].rstrip("/"))
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", found).lstrip(".-")[:60]
    return cleaned or "job"


def rank_number(asked: str | None, environment: Mapping[str, str]) -> int:
    """The rank: as asked, or as the launcher numbers it. A variable that holds no number is somebody else's."""
    if asked is not None:
        if not _is_rank(asked):
            raise _Wrong(f"{asked!r} cannot be a rank: it is a number from 0 on")
        return int(asked)
    return next((int(environment[name]) for name in RANK_VARIABLES if _is_rank(environment.get(name, ""))), 0)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_RANK


def _fail(message: str, *, as_json: bool) -> int:
    if as_json:
        answer = {
            "error": "run-failed",
            "message": message,
            "remedy": "see migrator run --help",
            "where": "not touched",
        }
        print(json.dumps(answer), flush=True)
    else:
        print(f"migrator run: {message}", file=sys.stderr)
    return FAILED
