"""Supports launchers that start the ranks themselves (torchrun and programs based on it): each worker becomes a rank.

torchrun starts its workers with $PYTHON_EXEC if it is set. So the launcher itself runs unchanged and is not a rank.
PYTHON_EXEC names `shim/keeper/worker-python`, which is `migrator run --worker`. The launcher's agent waits for that keeper,
so it does not notice when the worker moves. The worker gets the environment that the launcher would have given it. accelerate
does the same, or starts a single process with sys.executable, which `shim/keeper/launch.py` handles.

Invariant: nothing is guessed after the start. A launch whose workers would not be started through PYTHON_EXEC is refused.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

_KEEPER = Path(__file__).parents[2] / "shim" / "keeper"
WORKER_PYTHON, LAUNCH = _KEEPER / "worker-python", _KEEPER / "launch.py"

#: Internal variables for `migrator run --worker`; the worker does not get them.
INTERPRETER, FORMER, SHIMLESS = "MIGRATOR_INTERPRETER", "MIGRATOR_PYTHON_EXEC", "MIGRATOR_NO_SHIM"
JOB = "MIGRATOR_JOB"

#: Disables NCCL resources that stay open when all communicators are destroyed: the RAS threads and their port, multicast
#: memory that is shared between nodes, host memory that the driver cannot checkpoint.
NCCL_PRESETS = {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}

#: How a rank's device memory is moved: by the driver's checkpoint, or faster by the shim, for memory that is allocated with
#: the shim loaded from the start. shim/keeper/child.py preloads the library that this selects.
DEVICE_MEMORY_VARIABLE = "SNAPSHIM_DEVICE_MEMORY"
DEVICE_MEMORY_CHOICES = ("driver", "offload")
DEVICE_MEMORY_DEFAULT = "offload"

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
#: Interpreter options whose value is the next argument.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = ("accelerate-launch", "accelerate.commands.launch")
_ACCELERATE_VERBS = ("accelerate", "accelerate.commands.accelerate_cli")
_NO_PYTHON = ("--no-python", "--no_python", "--run-path", "--run_path")


class NotProtectable(Exception):
    """The launcher would start workers that are not ranks. The message names the option and what to write instead."""


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command starts ranks through PYTHON_EXEC. Raises NotProtectable if an option prevents that."""
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
            break  # the script; its own arguments follow
    return True


def launching(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that starts this launcher. accelerate is started by shim/keeper/launch.py if it is a Python script."""
    words = list(command)
    program = _program(words)
    if not program or os.path.basename(program[0]) not in _ACCELERATE + _ACCELERATE_VERBS:
        return words
    if len(program) < len(words):  # started by an interpreter: words[at] is the script, or the module of `-m`
        at = len(words) - len(program)
        return [*words[: at - (words[at - 1] == "-m")], str(LAUNCH), *words[at - (words[at - 1] == "-m") :]]
    script = shutil.which(words[0], path=environment.get("PATH"))
    interpreter = _interpreter(script) if script is not None else ""
    return [interpreter, str(LAUNCH), str(script), *words[1:]] if interpreter else words


def _interpreter(script: str) -> str:
    """The Python interpreter that a script names in its first line; empty for any other file."""
    try:
        with open(script, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return ""
    word = os.fsdecode(first[2:]).strip() if first.startswith(b"#!") else ""
    return word if _PYTHON.fullmatch(os.path.basename(word)) else ""


def _program(command: Sequence[str]) -> list[str]:
    """The command without a leading interpreter: the script, or the module of `-m`, and its arguments."""
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
    """The launcher's environment; `interpreter` is the one that has this package."""
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
    """The worker's environment, without our variables: a launcher that the worker starts belongs to the worker's rank."""
    made = {name: value for name, value in environment.items() if name not in (INTERPRETER, FORMER, SHIMLESS, JOB)}
    made.pop("PYTHON_EXEC", None)
    if FORMER in environment:
        made["PYTHON_EXEC"] = environment[FORMER]
    return made


def rank_environment(environment: Mapping[str, str], device_memory: str | None = None) -> dict[str, str]:
    """The given environment with defaults for what is not set: those that make NCCL's communicators removable, and how device
    memory is moved. `device_memory`, if given, overrides the environment."""
    made = {**NCCL_PRESETS, DEVICE_MEMORY_VARIABLE: DEVICE_MEMORY_DEFAULT, **environment}
    if device_memory is not None:
        made[DEVICE_MEMORY_VARIABLE] = device_memory
    return made


def worker_python(environment: Mapping[str, str], parent: int) -> str:
    """The interpreter that the launcher would have used: the $PYTHON_EXEC it was given, else its own.

    Its own is the first word of its command line, found as Python finds sys.executable. /proc/PID/exe is not used because it
    leads out of a virtual environment.
    """
    if FORMER in environment:
        return environment[FORMER]
    word = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0].decode(errors="surrogateescape")
    found = shutil.which(word, path=environment.get("PATH"))
    if found is None or not _PYTHON.fullmatch(os.path.basename(found)):
        raise NotProtectable(
            f"the launcher calls itself {word!r}, which is not a Python interpreter; name its interpreter with PYTHON_EXEC"
        )
    return found
