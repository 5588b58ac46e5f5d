"""Reads a command line: what it runs, without the programs and interpreters in front of that.

Invariant: only words are looked at, and the first line of a script. What is not understood is returned as it is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

PYTHON = re.compile(r"(python|pypy)[0-9.]*")
#: Interpreter options whose value is the next argument.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
#: `-um MODULE` and `-mMODULE`: flags without a value may precede the m.
_MODULE = re.compile(r"-[bBdEhiIOPqsSuvVx?]*m(.*)", re.DOTALL)
#: `migrator run -- env A=1 python train.py`
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_SHELLS = ("sh", "bash", "dash", "zsh")
_SCRIPTS = (".py", ".sh", ".bash", ".zsh")
#: Programs that run a command unchanged: their options with a value, and how many arguments precede the command.
_WRAPPERS: dict[str, tuple[tuple[str, ...], int]] = {
    "env": (("-u", "-C", "--unset", "--chdir"), 0),
    "nohup": ((), 0),
    "setsid": ((), 0),
    "nice": (("-n", "--adjustment"), 0),
    "ionice": (("-c", "-n", "--class", "--classdata"), 0),
    "stdbuf": (("-i", "-o", "-e", "--input", "--output", "--error"), 0),
    "timeout": (("-s", "-k", "--signal", "--kill-after"), 1),
    "numactl": (("-N", "-m", "-C", "-i", "-p", "--cpunodebind", "--membind", "--physcpubind", "--interleave"), 0),
    "taskset": (("-c", "--cpu-list"), 0),
}


def unwrapped(command: Sequence[str]) -> list[str]:
    """The command without programs like `env` and `nohup` in front of it. Its words are the last ones of `command`."""
    words = list(command)
    while words:
        if _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
            continue
        found = _WRAPPERS.get(os.path.basename(words[0]))
        if found is None:
            return words
        options, arguments = found
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-":
            words = words[2 if words[0] in options else 1 :]
        words = words[arguments:]
    return []


def program(command: Sequence[str]) -> list[str]:
    """The command without a leading interpreter: the script, or the module of `-m`, and its arguments."""
    words = list(command)
    if not words or not PYTHON.fullmatch(os.path.basename(words[0])):
        return words
    skip = False
    for index, word in enumerate(words[1:], 1):
        if skip:
            skip = False
        elif found := _MODULE.fullmatch(word):
            return [found[1], *words[index + 1 :]] if found[1] else words[index + 1 :]
        elif word == "-c" or word == "-":
            return []
        elif not word.startswith("-"):
            return words[index:]
        else:
            skip = word in _WITH_VALUE
    return []


def named_after(command: Sequence[str]) -> str:
    """What a command runs, as a person would call it: "train" for `python -u train.py --lr 1`, `bash train.sh` and
    `python -m my.train`. Without a script it is the program's own name."""
    words = unwrapped(command)
    run = program(words)
    as_module = bool(run) and run != words and any(map(_MODULE.fullmatch, words[: len(words) - len(run) + 1]))
    if words and os.path.basename(words[0]) in _SHELLS:
        run = [word for word in words[1:] if not word.startswith("-")] if "-c" not in words else []
    name = os.path.basename((run or words or [""])[0].rstrip("/"))
    if as_module and run:
        return name.removesuffix(".__main__").rpartition(".")[2]
    stem, suffix = os.path.splitext(name)
    return stem if suffix in _SCRIPTS else name


def started_by(command: Sequence[str], starter: str, path: str | None) -> list[str] | None:
    """The command with `starter`, a Python script, between the interpreter and the script or module that it runs. None if
    it does not run Python, or in a way that is not understood."""
    words = unwrapped(command)
    before = list(command)[: len(command) - len(words)]
    run = program(words)
    if not run:
        return None
    if run != words:  # started by an interpreter
        at = len(words) - len(run)
        attached = _MODULE.fullmatch(words[at]) if words[at] != run[0] else None
        if attached is not None:  # -mMODULE
            flags = words[at][: attached.start(1)]
            return [*before, *words[:at], *_flags(flags), starter, "-m", *run]
        module = _MODULE.fullmatch(words[at - 1])
        if module is not None:
            return [*before, *words[: at - 1], *_flags(words[at - 1]), starter, "-m", *run]
        return [*before, *words[:at], starter, *run]
    script = shutil.which(words[0], path=path)
    interpreter = _interpreter(script) if script is not None else []
    return [*before, *interpreter, starter, str(script), *words[1:]] if interpreter else None


def _flags(module_option: str) -> list[str]:
    """`-um` without its m."""
    return [] if module_option == "-m" else [module_option[:-1]]


def _interpreter(script: str) -> list[str]:
    """The Python interpreter that a script names in its first line, and its options; empty for any other file."""
    try:
        with open(script, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return []
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    words = unwrapped(words)  # /usr/bin/env python3
    return words if words and PYTHON.fullmatch(os.path.basename(words[0])) else []
