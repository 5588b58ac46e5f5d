"""The command line: finds the verb and turns the way the program ends into an exit code.

Invariant: `migrator run` becomes a rank's keeper, so nothing heavy is loaded for it (no gRPC, no rich, no cryptography). This
file and run.py import only the standard library. Every other verb is in one short file, which program.py loads.
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
        if at is None or arguments[at] != "lab":  # the daemons and ranks of a lab inherit our environment
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own errors say more than gRPC's log lines
        from migrator.cli import program

        return program.main(arguments, arguments[at] if at is not None else "")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited (`migrator ps | head -1`), so no report can be made.
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
