"""The command line: finds the verb, and translates every end into an exit code, once, here.

Invariant: `migrator run` becomes a rank's keeper, so nothing heavy is loaded for it (no gRPC, no rich, no
cryptography): this file and run.py import the standard library alone. Every other verb is one short file, loaded with
the parser of them all (arguments.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: Global options that take a value: what follows them is not the verb.
_WITH_VALUE = ("--cluster", "--lab")
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = _verb_at(arguments)
    try:
        if at is not None and arguments[at] == "run":
            from migrator.cli import run

            return run.main(arguments[:at] + arguments[at + 1 :], given=at)
        if at is None or arguments[at] != "lab":  # a lab's daemons and ranks inherit our environment
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines say what our errors say better
        from migrator.cli import program

        return program.main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone (`migrator ps | head -1`): nobody is left to complain to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _verb_at(arguments: Sequence[str]) -> int | None:
    """The index of the verb: the first word that is neither an option nor an option's value."""
    skip = False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word in _WITH_VALUE:
            skip = True
        elif not word.startswith("-"):
            return index
    return None
