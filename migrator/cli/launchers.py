"""Supports launchers that start the ranks themselves (torchrun and programs based on it): each worker becomes a rank.

torchrun starts its workers with $PYTHON_EXEC if it is set. So the launcher itself runs unchanged and is not a rank.
PYTHON_EXEC names `shim/keeper/worker-python`, which is `migrator run --worker`. The launcher's agent waits for that keeper,
so it does not notice when the worker moves. The worker gets the environment that the launcher would have given it. accelerate
does the same, or starts a single process with sys.executable, which `shim/keeper/launch.py` handles. deepspeed starts another
launcher with sys.executable, and that one starts the workers with it: `migrator run --worker` recognises it.

mpirun and srun start any command, so `migrator run` is written in front of it (starters.py).

Invariant: nothing is guessed after the start. A launch whose workers would not be started through PYTHON_EXEC is refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from migrator.cli import caches, no_ranks, protection
from migrator.cli.command_words import PYTHON, program, started_by, unwrapped

_KEEPER = Path(__file__).parents[2] / "shim" / "keeper"
WORKER_PYTHON, LAUNCH = _KEEPER / "worker-python", _KEEPER / "launch.py"

#: Internal variables for `migrator run --worker`; the worker does not get them.
INTERPRETER, FORMER, SHIMLESS = "MIGRATOR_INTERPRETER", "MIGRATOR_PYTHON_EXEC", "MIGRATOR_NO_SHIM"
UNPROTECTED, CAUTIOUS = "MIGRATOR_ALLOW_UNPROTECTED", "MIGRATOR_NCCL_SAFE"
JOB, STORE_SET = "MIGRATOR_JOB", "MIGRATOR_STORE_SET"

#: RAS keeps a thread and sockets when all communicators are destroyed, and nothing but the end of the process closes them. It
#: is for diagnosis; without it NCCL is as fast.
NCCL_PRESETS = {"NCCL_RAS_ENABLE": "0"}
#: `--nccl-safe` also disables features whose memory the driver may not be able to checkpoint if NCCL keeps it: NVLink SHARP's
#: multicast memory, and host memory of the driver. They are on otherwise: what NCCL really leaves decides during a move.
NCCL_SAFE = {**NCCL_PRESETS, "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}

#: With a rendezvous of kind c10d, torchrun's ranks use a store in the launcher, unless this is set: then rank 0 has it. A
#: whole job can only be suspended or rolled back with its store. With `--master-addr` the launcher always has it (stores.py).
STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

#: How a rank's device memory is moved: by the driver's checkpoint, or faster by the shim, for memory that is allocated with
#: the shim loaded from the start; `shared`: that and what processes share of it (CUDA IPC). shim/keeper/child.py preloads the
#: library that this selects.
DEVICE_MEMORY_VARIABLE = "SNAPSHIM_DEVICE_MEMORY"
DEVICE_MEMORY_CHOICES = ("driver", "offload", "shared")
DEVICE_MEMORY_DEFAULT = "offload"

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = ("accelerate-launch", "accelerate.commands.launch")
_ACCELERATE_VERBS = ("accelerate", "accelerate.commands.accelerate_cli")
_DEEPSPEED = ("deepspeed", "deepspeed.pt", "deepspeed.launcher.runner", "deepspeed.launcher.launch")
#: The launchers among them that other launchers start with sys.executable.
_NESTED = ("deepspeed.launcher.launch",)
#: Launchers that start their workers by themselves, as children on this node.
_ONE_TREE = ("ray", "colossalai", "horovodrun")
_NO_PYTHON = ("--no-python", "--no_python", "--run-path", "--run_path")
#: Programs whose work is not done by their own processes.
_ELSEWHERE = ("sbatch", "qsub", "bsub", "kubectl", "ssh", "pdsh", "docker", "podman")


class NotProtectable(Exception):
    """The launcher would start workers that are not ranks. The message names the option and what to write instead."""


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command starts ranks through PYTHON_EXEC. Raises NotProtectable if an option prevents that."""
    words = program(unwrapped(command))
    if not words:
        return False
    name, rest = os.path.basename(words[0]), words[1:]
    if name in _ACCELERATE_VERBS:
        if not rest or rest[0] != "launch":
            return False
        rest = rest[1:]
    elif name not in _TORCHRUN + _ACCELERATE + _DEEPSPEED:
        return False
    for word in rest:
        if word in _NO_PYTHON:
            instead = "--no_python --no_local_rank" if name in _DEEPSPEED else "--no-python"
            raise NotProtectable(
                f"{name} {word} starts the workers itself; write `migrator run --` in front of their command instead: "
                f"{name} {instead} … migrator run -- CMD …"
            )
        if word.endswith(".py"):
            break  # the script; its own arguments follow
    return True


def must_start_ranks(command: Sequence[str]) -> None:
    """For `--launcher`: raises NotProtectable for a launcher that is known not to start its workers with PYTHON_EXEC. The job
    would run without a single rank, and nothing would say so."""
    words = program(unwrapped(command))
    name = os.path.basename(words[0]) if words else ""
    if name in _ONE_TREE:
        raise NotProtectable(
            f"{name} does not start its workers with $PYTHON_EXEC, so none of them would be a rank; without --launcher all"
            f" its processes on this node are one rank: migrator run -- {name} …"
        )


def must_keep_its_processes(command: Sequence[str]) -> None:
    """Raises NotProtectable for a program that returns at once and leaves its processes behind: a rank's processes are ended
    when its first one ends."""
    words = program(unwrapped(command))
    if [os.path.basename(word) for word in words[:1]] + words[1:2] == ["ray", "start"] and "--block" not in words:
        raise NotProtectable(
            "ray start returns at once, and its processes would be ended with it; add --block: migrator run -- ray start"
            " --block …"
        )


def works_elsewhere(command: Sequence[str]) -> str:
    """The name of a program that has its work done by processes that are not its own, which would not be ranks; else ""."""
    words = program(unwrapped(command))
    name = os.path.basename(words[0]) if words else ""
    if name == "ray" and words[1:2] and words[1] in ("job", "submit", "exec", "up", "attach"):
        return f"ray {words[1]}"
    return name if name in _ELSEWHERE else ""


def launching(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that starts this launcher. accelerate and deepspeed are started by shim/keeper/launch.py; accelerate only
    if it is a Python script. Raises NotProtectable for a deepspeed that is none."""
    words = program(unwrapped(command))
    name = os.path.basename(words[0]) if words else ""
    if name not in _ACCELERATE + _ACCELERATE_VERBS + _DEEPSPEED:
        return list(command)
    found = started_by(command, str(LAUNCH), environment.get("PATH"))
    if found is None and name in _DEEPSPEED:
        raise NotProtectable(
            f"{words[0]} was not found, or is not a Python script, so its workers would not be ranks; write it with its"
            " interpreter: migrator run -- python -m deepspeed.launcher.runner …"
        )
    return list(command) if found is None else found


def nested(command: Sequence[str]) -> list[str] | None:
    """For a worker: if it is not a rank but another launcher, the command that starts that one."""
    words = program(command)
    if not words or words[0] not in _NESTED:
        return None
    return started_by(command, str(LAUNCH), None)


def launcher_environment(
    environment: Mapping[str, str],
    interpreter: str,
    job: str | None,
    preload: bool,
    device_memory: str | None = None,
    allow_unprotected: bool = False,
    nccl_safe: bool = False,
    protect: dict[str, str] | None = None,
) -> dict[str, str]:
    """The launcher's environment; `interpreter` is the one that has this package."""
    made = {**environment, INTERPRETER: interpreter, "PYTHON_EXEC": str(WORKER_PYTHON)}
    if STORE_VARIABLE not in environment:
        made |= {STORE_VARIABLE: "1", STORE_SET: "1"}
    former = environment.get("PYTHON_EXEC")
    if former is not None and former != str(WORKER_PYTHON):
        made[FORMER] = former
    if job is not None:
        made[JOB] = job
    if not preload:
        made[SHIMLESS] = "1"
    if allow_unprotected:
        made[UNPROTECTED] = "1"
    if nccl_safe:
        made[CAUTIOUS] = "1"
    if device_memory is not None:
        made[DEVICE_MEMORY_VARIABLE] = device_memory
    return made | (protect or {})


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment, without our variables: a launcher that the worker starts belongs to the worker's rank."""
    own = {INTERPRETER, FORMER, SHIMLESS, UNPROTECTED, CAUTIOUS, JOB, no_ranks.VARIABLE, *protection.VARIABLES}
    if STORE_SET in environment:
        own |= {STORE_SET, STORE_VARIABLE}
    made = {name: value for name, value in environment.items() if name not in own}
    made.pop("PYTHON_EXEC", None)
    if FORMER in environment:
        made["PYTHON_EXEC"] = environment[FORMER]
    return made


def rank_environment(
    environment: Mapping[str, str], device_memory: str | None = None, *, nccl_safe: bool = False
) -> dict[str, str]:
    """The given environment with defaults for what is not set: those that make NCCL's communicators removable, where caches
    are, and how device memory is moved. `device_memory`, if given, overrides the environment, and so does `nccl_safe`."""
    made = {**NCCL_PRESETS, DEVICE_MEMORY_VARIABLE: DEVICE_MEMORY_DEFAULT, **caches.presets(environment), **environment}
    if nccl_safe:
        made |= NCCL_SAFE
    if device_memory is not None:
        made[DEVICE_MEMORY_VARIABLE] = device_memory
    return made


def keeps_ras(environment: Mapping[str, str]) -> str:
    """The setting that lets NCCL keep RAS, as text; "" if it is off."""
    value = environment.get("NCCL_RAS_ENABLE", "0")
    return "" if value == "0" else f"NCCL_RAS_ENABLE={value}"


def keep_devices(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Settings with which NCCL, or its plugin for another network, has devices open that the shim cannot close; and the
    setting that allows a move. A plugin that NCCL finds by itself is not known here: preflight names it."""
    found = []
    plugin = environment.get("NCCL_NET_PLUGIN", "none")
    if plugin not in {"", "none"}:
        found.append((f"NCCL_NET_PLUGIN={plugin}", "NCCL_NET_PLUGIN=none, with NCCL's own InfiniBand and RoCE,"))
    if environment.get("NCCL_GDRCOPY_ENABLE", "0") not in {"", "0"}:
        found.append(("NCCL_GDRCOPY_ENABLE=1", "NCCL_GDRCOPY_ENABLE=0, NCCL's default,"))
    return found


def worker_python(environment: Mapping[str, str], parent: int) -> str:
    """The interpreter that the launcher would have used: the $PYTHON_EXEC it was given, else its own.

    Its own is the first word of its command line, found as Python finds sys.executable. /proc/PID/exe is not used because it
    leads out of a virtual environment.
    """
    if FORMER in environment:
        return environment[FORMER]
    word = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0].decode(errors="surrogateescape")
    found = shutil.which(word, path=environment.get("PATH"))
    if found is None or not PYTHON.fullmatch(os.path.basename(found)):
        raise NotProtectable(
            f"the launcher calls itself {word!r}, which is not a Python interpreter; name its interpreter with PYTHON_EXEC"
        )
    return found
