"""Launchers that start the ranks themselves: torchrun and what is built on it. Each of their workers becomes a rank.

torchrun starts its workers with $PYTHON_EXEC where that is set. So the launcher runs as it is, unprotected, with
PYTHON_EXEC naming `shim/keeper/worker-python`, which is `migrator run --worker`; the agent waits for that keeper and never
sees its worker leave. The worker itself gets its environment as the launcher would have given it. accelerate does the same,
or starts a single process by sys.executable, which `shim/keeper/launch.py` provides for.

Invariant: nothing here is guessed after the start. A launch whose workers would not pass through PYTHON_EXEC is refused.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

_KEEPER = Path(__file__).parents[2] / "shim" / "keeper"
WORKER_PYTHON, LAUNCH = _KEEPER / "worker-python", _KEEPER / "launch.py"

#: Ours, for `migrator run --worker`; none of them reaches the worker.
INTERPRETER, FORMER, SHIMLESS = "MIGRATOR_INTERPRETER", "MIGRATOR_PYTHON_EXEC", "MIGRATOR_NO_SHIM"
JOB = "MIGRATOR_JOB"

#: What NCCL keeps open beside its communicators, so that destroying them does not close it, switched off: the RAS
#: threads and their port, multicast memory that is shared between nodes, host memory that the driver cannot checkpoint.
NCCL_PRESETS = {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}

#: Who moves a rank's device memory: the driver's checkpoint, or for what it allocates from the start on the shim, faster.
#: shim/keeper/child.py preloads the library that does what it says.
DEVICE_MEMORY_VARIABLE = "SNAPSHIM_DEVICE_MEMORY"
DEVICE_MEMORY_CHOICES = ("driver", "offload")
DEVICE_MEMORY_DEFAULT = "offload"

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
#: Interpreter options whose value is the next word.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = ("accelerate-launch", "accelerate.commands.launch")
_ACCELERATE_VERBS = ("accelerate", "accelerate.commands.accelerate_cli")
_NO_PYTHON = ("--no-python", "--no_python", "--run-path", "--run_path")


class NotProtectable(Exception):
    """The launcher would start workers past us. The message says which option does, and what to write instead."""


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command starts ranks by way of PYTHON_EXEC. Raises NotProtectable where it was told not to."""
    words = _program(command)
    if not words:
        return False
    name, rest = os.path.basename(words[0]), words[1:]
    if name in _ACCELERATE_VERBS:
        if not rest or rest[0] != "launch":
            return False
        rest = rest[1:]
    elif name not in _TORCHRUN + _ACCELERATE:
        return False
    for word in rest:
        if word in _NO_PYTHON:
            raise NotProtectable(
                f"{name} {word} starts the workers itself; write `migrator run --` in front of their command instead: "
                f"{name} --no-python … migrator run -- CMD …"
            )
        if word.endswith(".py"):
            break  # the script: what follows is its own
    return True


def launching(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that starts this launcher. accelerate's runs through shim/keeper/launch.py if it is a Python script."""
    words = list(command)
    program = _program(words)
    if not program or os.path.basename(program[0]) not in _ACCELERATE + _ACCELERATE_VERBS:
        return words
    if len(program) < len(words):  # behind an interpreter: words[at] is the script, or the module of `-m`
        at = len(words) - len(program)
        return [*words[: at - (words[at - 1] == "-m")], str(LAUNCH), *words[at - (words[at - 1] == "-m") :]]
    script = shutil.which(words[0], path=environment.get("PATH"))
    interpreter = _interpreter(script) if script is not None else ""
    return [interpreter, str(LAUNCH), str(script), *words[1:]] if interpreter else words


def _interpreter(script: str) -> str:
    """The Python that a script names in its first line; empty for any other."""
    try:
        with open(script, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return ""
    word = os.fsdecode(first[2:]).strip() if first.startswith(b"#!") else ""
    return word if _PYTHON.fullmatch(os.path.basename(word)) else ""


def _program(command: Sequence[str]) -> list[str]:
    """The command without the interpreter in front: the script, or the module of `-m`, and its arguments."""
    words = list(command)
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        return words
    skip = False
    for index, word in enumerate(words[1:], 1):
        if skip:
            skip = False
        elif word == "-m":
            return words[index + 1 :]
        elif word == "-c" or word == "-":
            return []
        elif not word.startswith("-"):
            return words[index:]
        else:
            skip = word in _WITH_VALUE
    return []


def launcher_environment(
    environment: Mapping[str, str], interpreter: str, job: str | None, preload: bool, device_memory: str | None = None
) -> dict[str, str]:
    """What the launcher runs with; `interpreter` is the one that has this package."""
    made = {**environment, INTERPRETER: interpreter, "PYTHON_EXEC": str(WORKER_PYTHON)}
    former = environment.get("PYTHON_EXEC")
    if former is not None and former != str(WORKER_PYTHON):
        made[FORMER] = former
    if job is not None:
        made[JOB] = job
    if not preload:
        made[SHIMLESS] = "1"
    if device_memory is not None:
        made[DEVICE_MEMORY_VARIABLE] = device_memory
    return made


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The worker's own: a launcher that it starts in turn is part of its tree, and not ours to protect again."""
    made = {name: value for name, value in environment.items() if name not in (INTERPRETER, FORMER, SHIMLESS, JOB)}
    made.pop("PYTHON_EXEC", None)
    if FORMER in environment:
        made["PYTHON_EXEC"] = environment[FORMER]
    return made


def rank_environment(environment: Mapping[str, str], device_memory: str | None = None) -> dict[str, str]:
    """A rank's own, as it was given, with presets for what was not set: its NCCL communicators can be taken down, and who
    moves its device memory is said. `device_memory`: what was asked for counts before what was given."""
    made = {**NCCL_PRESETS, DEVICE_MEMORY_VARIABLE: DEVICE_MEMORY_DEFAULT, **environment}
    if device_memory is not None:
        made[DEVICE_MEMORY_VARIABLE] = device_memory
    return made


def worker_python(environment: Mapping[str, str], parent: int) -> str:
    """The interpreter that the launcher would have used: $PYTHON_EXEC as it was given to it, else its own.

    Its own is the first word of its command line, found as Python finds sys.executable; /proc/PID/exe would lead out of a
    virtual environment.
    """
    if FORMER in environment:
        return environment[FORMER]
    word = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0].decode(errors="surrogateescape")
    found = shutil.which(word, path=environment.get("PATH"))
    if found is None or not _PYTHON.fullmatch(os.path.basename(found)):
        raise NotProtectable(
            f"the launcher calls itself {word!r}, which is no Python; name its interpreter with PYTHON_EXEC"
        )
    return found
