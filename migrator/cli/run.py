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
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from migrator import formatting
from migrator.cli import caches, command_words, intervals, launchers, no_ranks, protection, starters, stores

if TYPE_CHECKING:
    from shim.keeper.library import Library

FAILED = 125
KEEPER_SOCKET = "/run/snapshotd/keeper.sock"
MAX_RANK = 1 << 24
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_WITH_VALUE = (
    *("--job", "--rank", "--device-memory", "--cluster", "--lab"),
    *(protection.REPLAYED_OPTION, protection.CHANGED_OPTION, protection.COPIES_OPTION),
)

_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")

SUMMARY = "start a command as a rank that can be moved"
EXAMPLES = f"""\
examples:
  migrator run -- python train.py
  migrator run --job night --rank 3 -- python train.py --lr 0.1
  srun migrator run -- python train.py                  takes job and rank from Slurm; also migrator run -- srun …
  migrator run -- torchrun --nnodes 4 … train.py        every worker is a rank; also python -m torch.distributed.run
  migrator run -- accelerate launch … train.py          the same: deepspeed, mpirun, mpiexec
  migrator run --launcher -- ./start.sh                 the ranks are what it starts with torchrun
  migrator run --protect 5m -- python train.py          every 5 minutes a snapshot, to which the job goes back after a loss

The job is named after $MIGRATOR_JOB, the Slurm job, the torchrun run id, or else the script: train.py is job train, and
train-2 if a job train of yours runs already. The rank is $RANK, $SLURM_PROCID, $OMPI_COMM_WORLD_RANK,
$PMI_RANK, $PMIX_RANK, $MV2_COMM_WORLD_RANK, or else 0. The daemon's socket is $SNAPSHOTD_KEEPER_SOCKET, or else
/run/snapshotd/keeper.sock.

Unless they are already set, the command gets NCCL_RAS_ENABLE=0, because NCCL otherwise keeps sockets that cannot be moved,
and {launchers.DEVICE_MEMORY_VARIABLE}={launchers.DEVICE_MEMORY_DEFAULT}; not with --no-shim. NCCL's other features stay as
they are; --nccl-safe switches those off that may keep memory which cannot be moved: NCCL_NVLS_ENABLE=0
NCCL_CUMEM_HOST_ENABLE=0. If the home directory is on a disk
of this node, the command also gets {caches.TRITON_VARIABLE}=/tmp/triton_UID: that cache moves with the rank.

exit codes: that of the command, on whichever node it ended (a signal that kills it kills this process, too);
  125  could not be started as a rank      126  cannot be executed      127  not found
"""


class _Wrong(Exception):
    """Invalid arguments."""


class _Unprotected(_Wrong):
    """The rank would run without its library."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Wrong(f"{message}; see migrator run --help")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="migrator run",
        usage="migrator run [--job NAME] [--rank N | --launcher] [--device-memory driver|offload|shared]"
        " [--protect [5m|auto]] [--copies N] [--replayed-output suppress|mark|pass] [--changed-files restore|keep|refuse]"
        " [--nccl-safe] [--no-shim] [--allow-unprotected] [--json] -- CMD …",
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
        help="how device memory is moved: by the CUDA driver's checkpoint, or by the shim, which is faster; shared: also what"
        " processes share of it (CUDA IPC); recording an event that another process has opened then waits until the work"
        " before it is done "
        f"(default: ${launchers.DEVICE_MEMORY_VARIABLE}, else {launchers.DEVICE_MEMORY_DEFAULT})",
    )
    protection.add_options(made)
    made.add_argument(
        "--nccl-safe",
        action="store_true",
        help="switch off NCCL's features that may keep something when communicators are taken down (RAS, NVLink SHARP, host"
        " memory of the CUDA driver), whatever the environment says; a move is less likely to be undone, NCCL may be slower",
    )
    made.add_argument("--no-shim", action="store_true", help="do not preload libsnapshim*.so")
    made.add_argument(
        "--allow-unprotected",
        action="store_true",
        help="start the command even if it cannot be protected, because its library is missing or of another version or"
        " architecture; a warning says so",
    )
    made.add_argument(
        "--json", action="store_true", help="print errors of this program as JSON; the command's output is unchanged"
    )
    # Accepted by every verb. A rank needs only its own node; its protection needs the cluster.
    made.add_argument("--cluster", help=argparse.SUPPRESS)
    made.add_argument("--lab", help=argparse.SUPPRESS)
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
        protect = protection.chosen(options, environment, _warn)
        if options.worker:
            command = [launchers.worker_python(environment, os.getppid()), *command]
            if (nested := launchers.nested(command)) is not None:
                return _become(nested, environment)
            no_ranks.report(environment)
        elif starters.name_of(command):
            return _start(command, options, protect)
        elif options.launcher or launchers.is_launcher(command):
            return _launch(command, options, protect)
        else:
            launchers.must_keep_its_processes(command)
            _warn_of_work_elsewhere(command)
        job = job_name(options.job, command, environment)
        rank = rank_number(options.rank, environment)
        socket = environment.get("SNAPSHOTD_KEEPER_SOCKET") or KEEPER_SOCKET
        preload, allowed, cautious = not options.no_shim, options.allow_unprotected, options.nccl_safe
        if options.worker:
            preload, allowed = launchers.SHIMLESS not in environment, launchers.UNPROTECTED in environment
            cautious = launchers.CAUTIOUS in environment
            environment = launchers.worker_environment(environment)
            if protect:
                environment = stores.of_rank_0(environment, rank)
        library = None
        if preload:
            prepared = launchers.rank_environment(environment, options.device_memory, nccl_safe=cautious)
            if not options.worker and rank == 0:  # once for a job
                _warn_of_nccl(prepared)
            library = _library(prepared, allowed)
            environment = environment if library is None else prepared
        from shim.keeper import start

        is_guarded = protection.is_guard(rank, os.environ)
        alone = not options.worker and stands_alone(options.job, options.rank, os.environ)
        return start.run(
            command,
            job,
            rank,
            socket,
            environment=environment,
            preload=library,
            alone=alone,
            allow_unprotected=allowed,
            replayed=protection.replayed(options.replayed_output, os.environ),
            companion=partial(protection.argv, protect, rank) if is_guarded and protect else None,
        )
    except _Unprotected as error:
        return _fail(str(error), remedy=error.remedy, as_json="--json" in own)
    except (_Wrong, protection.Invalid, launchers.NotProtectable, stores.PortInUse) as error:
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


def _library(environment: Mapping[str, str], allowed: bool) -> Library | None:
    """The library for a rank with this environment; None if it cannot be used and that is allowed."""
    from shim.keeper import library

    try:
        return library.usable(library.wanted(environment), environment)
    except library.Unusable as error:
        if not allowed:
            raise _Unprotected(
                f"{error}, so the rank could not be moved; it was not started",
                f"{error.remedy}, or start it without protection with --allow-unprotected",
            ) from error
        _warn(f"{error}; the rank runs without protection")
        return None


def _launch(command: Sequence[str], options: argparse.Namespace, protect: protection.Wanted | None) -> int:
    """Becomes the launcher. Each of its workers calls `migrator run --worker`."""
    if options.rank is not None:
        raise _Wrong("--rank cannot be used with a launcher, which numbers its ranks itself")
    launchers.must_start_ranks(command)
    if not options.no_shim:  # before the launcher starts workers that fail, or one warning for each of them
        prepared = launchers.rank_environment(os.environ, options.device_memory, nccl_safe=options.nccl_safe)
        _library(prepared, options.allow_unprotected)
        _warn_of_nccl(prepared)
    job = job_name(options.job, command, os.environ) if options.job is not None else None
    environment = launchers.launcher_environment(
        os.environ,
        sys.executable,
        job,
        not options.no_shim,
        options.device_memory,
        options.allow_unprotected,
        options.nccl_safe,
        {
            **(protect.variables if protect is not None else {}),
            protection.REPLAYED_VARIABLE: protection.replayed(options.replayed_output, os.environ),
        },
    )
    made = launchers.launching(command, environment)
    words = command_words.program(command_words.unwrapped(command)) or command
    environment |= no_ranks.watch(os.path.basename(words[0]))
    return _become(made, environment)


def _start(command: Sequence[str], options: argparse.Namespace, protect: protection.Wanted | None) -> int:
    """Becomes a program that starts commands, such as mpirun. Each of these calls `migrator run` by itself."""
    name = starters.name_of(command)
    if options.rank is not None:
        raise _Wrong(f"--rank cannot be used with {name}, which numbers its ranks itself")
    try:
        started = starters.commands(command)
        if any(launchers.is_launcher(each) for each in started):
            raise starters.NotUnderstood(f"{name} starts another launcher")
    except starters.NotUnderstood as error:
        raise _Wrong(f"{error}, so its ranks cannot be found; write it as {name} … migrator run -- CMD …") from error
    prefix = [sys.executable, "-P", "-m", "migrator.cli", "run"]
    if options.job is not None:
        prefix += ["--job", job_name(options.job, command, os.environ)]
    if options.device_memory is not None:
        prefix += ["--device-memory", options.device_memory]
    prefix += ["--nccl-safe"] if options.nccl_safe else []
    prefix += ["--no-shim"] if options.no_shim else []
    prefix += ["--allow-unprotected"] if options.allow_unprotected else []
    prefix += protect.options if protect is not None else []
    if options.replayed_output is not None:
        prefix += [protection.REPLAYED_OPTION, options.replayed_output]
    return _become(starters.with_prefix(command, [*prefix, "--"]), os.environ)


def _warn(text: str) -> None:
    print(f"migrator run: warning: {text}", file=sys.stderr, flush=True)


def _warn_of_work_elsewhere(command: Sequence[str]) -> None:
    if name := launchers.works_elsewhere(command):
        _warn(
            f"what {name} starts is not a process of its own, and not a rank; write `migrator run --` in front of the"
            " command that it starts"
        )


def _warn_of_nccl(environment: Mapping[str, str]) -> None:
    """Of settings with which the job, as it was started, cannot be moved."""
    if setting := launchers.keeps_ras(environment):
        _warn(
            f"{setting}: if the job uses NCCL before 2.28, its RAS keeps a thread and sockets when communicators are taken"
            " down, so a move of a rank will be undone; unset it, or use --nccl-safe"
        )
    for setting, instead in launchers.keep_devices(environment):
        _warn(
            f"{setting}: RDMA devices that are opened in this way cannot be closed for a move, which is refused while they"
            f" are open; {instead} allows it"
        )


def _become(command: Sequence[str], environment: Mapping[str, str]) -> int:
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
        is_value = index > 0 and (
            words[index - 1] in _WITH_VALUE
            or (words[index - 1] == protection.OPTION and intervals.is_one(words[index]))
        )
        if not words[index].startswith("-") and not is_value:
            return words[:index], words[index:]  # `migrator run CMD …`: a later `--` belongs to the command
    return words, []


def job_name(asked: str | None, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The job's name: the requested one, the launcher's, or that of the script."""
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
        found = command_words.named_after(command)
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", found).lstrip(".-")[:60]
    return cleaned or "job"


def stands_alone(job: str | None, rank: str | None, environment: Mapping[str, str]) -> bool:
    """Whether neither a person nor a launcher has named the job or numbered the rank. Such a job has one rank, and its name
    may get a suffix if it is taken; the ranks of a distributed job must all have the same name."""
    given = (*RANK_VARIABLES, launchers.JOB, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "WORLD_SIZE")
    return job is None and rank is None and not any(environment.get(name) for name in given)


def rank_number(asked: str | None, environment: Mapping[str, str]) -> int:
    """The rank: the requested one, or the launcher's. A variable that is not a number is ignored."""
    if asked is not None:
        if not _is_rank(asked):
            raise _Wrong(f"{asked!r} is not a rank: use a number from 0 on")
        return int(asked)
    return next((int(environment[name]) for name in RANK_VARIABLES if _is_rank(environment.get(name, ""))), 0)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_RANK


def _fail(message: str, *, as_json: bool, remedy: str = "") -> int:
    if as_json:
        answer = {
            "error": "run-failed",
            "message": message,
            "remedy": remedy or "see migrator run --help",
            "where": "not touched",
        }
        print(formatting.json_line(answer), flush=True)
    else:
        print(f"migrator run: {message}", *([f"remedy: {remedy}"] if remedy else []), sep="\n", file=sys.stderr)
    return FAILED
