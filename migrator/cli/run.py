"""`migrator run`: starts a command as a rank that can be moved. This process becomes its keeper.

Invariant: only the standard library is imported, and little of it, because this runs in front of every rank of every job.
Our own errors exit with 125, so that they differ from the command's. 126 and 127 mean the same as in a shell.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from migrator import formatting
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
  srun migrator run -- python train.py                  takes job and rank from Slurm
  migrator run -- torchrun --nnodes 4 … train.py        every worker is a rank; also python -m torch.distributed.run
  migrator run -- accelerate launch … train.py
  migrator run --launcher -- ./start.sh                 the ranks are what it starts with torchrun

The job is named after $MIGRATOR_JOB, the Slurm job, the torchrun run id, or else the command. The rank is $RANK,
$SLURM_PROCID, $OMPI_COMM_WORLD_RANK, $PMI_RANK, or else 0. The daemon's socket is $SNAPSHOTD_KEEPER_SOCKET, or else
/run/snapshotd/keeper.sock.

Unless they are already set, the command gets NCCL_RAS_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0, because NCCL
otherwise opens resources that cannot be moved, and
{launchers.DEVICE_MEMORY_VARIABLE}={launchers.DEVICE_MEMORY_DEFAULT}; not with --no-shim.

exit codes: that of the command, on whichever node it ended (a signal that kills it kills this process, too);
  125  could not be started as a rank      126  cannot be executed      127  not found
"""


class _Wrong(Exception):
    """Invalid arguments."""


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
    made.add_argument("--job", metavar="NAME", help="job of the rank")
    made.add_argument("--rank", metavar="N", help="number of the rank in its job")
    made.add_argument(
        "--launcher",
        action="store_true",
        help="treat CMD as a launcher: the ranks are what it starts with $PYTHON_EXEC",
    )
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # from shim/keeper/worker-python
    made.add_argument(
        "--device-memory",
        choices=launchers.DEVICE_MEMORY_CHOICES,
        help="how device memory is moved: by the CUDA driver's checkpoint, or by the shim, which is faster "
        f"(default: ${launchers.DEVICE_MEMORY_VARIABLE}, else {launchers.DEVICE_MEMORY_DEFAULT})",
    )
    made.add_argument("--no-shim", action="store_true", help="do not preload libsnapshim*.so")
    made.add_argument(
        "--json", action="store_true", help="print errors of this program as JSON; the command's output is unchanged"
    )
    made.add_argument(
        "--cluster", "--lab", help=argparse.SUPPRESS
    )  # accepted by every verb; a rank needs only its own node
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD …", help="command to run, and its arguments")
    return made


def main(arguments: Sequence[str], given: int = 0) -> int:
    """`arguments` is without the verb; the first `given` stood before it. Returns the rank's exit code."""
    own, command = _split(arguments, given)
    try:
        options = parser().parse_args(own)
        command = [*options.command, *command]
        _check_installation()
        if not command:
            raise _Wrong("no command given; write it after --: migrator run -- CMD …")
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
    """Becomes the launcher. Each of its workers calls `migrator run --worker`."""
    if options.rank is not None:
        raise _Wrong("--rank cannot be used with a launcher, which numbers its ranks itself")
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
    """Our own options, and the command after `--`, which is never parsed as ours."""
    words = list(arguments)
    for index in range(given, len(words)):
        if words[index] == "--":
            return words[:index], words[index + 1 :]
        if not words[index].startswith("-") and words[index - 1] not in _WITH_VALUE:
            return words[:index], words[index:]  # `migrator run CMD …`: a later `--` belongs to the command
    return words, []


def job_name(asked: str | None, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The job's name: the requested one, the launcher's, or the command's."""
    asked = environment.get(launchers.JOB) or None if asked is None else asked
    if asked is not None:
        if not _JOB.fullmatch(asked):
            raise _Wrong(f"{asked!r} is not a valid job name: use letters, digits, '_', '.', '-'; at most 60")
        return asked
    elastic = environment.get("TORCHELASTIC_RUN_ID", "")
    if environment.get("SLURM_JOB_ID"):
        found = f"{environment.get('SLURM_JOB_NAME') or 'slurm'}-{environment['SLURM_JOB_ID']}"
    elif elastic and elastic != "none":  # "none": torchrun's id for a job without one
        found = elastic
    else:
        found = os.path.basename(command[0].rstrip("/"))
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", found).lstrip(".-")[:60]
    return cleaned or "job"


def rank_number(asked: str | None, environment: Mapping[str, str]) -> int:
    """The rank: the requested one, or the launcher's. A variable that is not a number is ignored."""
    if asked is not None:
        if not _is_rank(asked):
            raise _Wrong(f"{asked!r} is not a rank: use a number from 0 on")
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
        print(formatting.json_line(answer), flush=True)
    else:
        print(f"migrator run: {message}", file=sys.stderr)
    return FAILED
