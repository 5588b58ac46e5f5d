"""All verbs except `run`: parses the command line, runs the verb, and turns failures into text or JSON and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from migrator.cli import output, run
from migrator.cli.arguments import Parser, Verbs, add_global_options, exit_codes
from snapshotd.api import version
from snapshotd.api.errors import Internal, SnapshotError, Usage

EXAMPLES = """\
examples:
  migrator run -- python train.py             start a rank that can be moved
  migrator ps                                 list the ranks of all nodes
  migrator move --rank 1 --to spare-1         move a rank while it trains
  migrator lab up && migrator lab run -- python train.py    try it on a single machine
"""

#: The modules of migrator.cli, each with the verbs that it adds, in the order of the help text.
MODULES = {
    "ps": ("ps",),
    "nodes": ("nodes",),
    "watch": ("watch",),
    "doctor": ("doctor",),
    "health": ("health",),
    "check": ("check",),
    "move": ("move",),
    "job": ("job",),
    "protect": ("protect",),
    "status": ("status",),
    "history": ("history",),
    "recover": ("recover",),
    "drain": ("drain", "evacuate", "return", "undrain"),
    "rebalance": ("rebalance",),
    "taint": ("taint", "untaint"),
    "proposals": ("proposals", "approve", "reject"),
    "spares": ("spares",),
    "autopilot": ("autopilot",),
    "policy": ("policy",),
    "report": ("report",),
    "cluster": ("cluster",),
    "lab": ("lab",),
    "pki": ("pki",),
}


def parser(verb: str = "") -> argparse.ArgumentParser:
    """The parser of all verbs, or of one: loading all of them takes longer than most verbs do."""
    made = Parser(
        prog="migrator",
        description="Move a rank of a running training job to another node, in the middle of a step.",
        epilog=f"{EXAMPLES}\n{exit_codes()}\n`migrator run` exits with its command's status, or with 125, 126 or 127.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_global_options(made)
    made.add_argument("--version", action="version", version=f"migrator {version.described()}")
    verbs = Verbs(made)
    verbs.add("run", None, run.SUMMARY)  # only for the list: `run` has its own parser
    for module, names in MODULES.items():
        if verb in names or not any(verb in others for others in MODULES.values()):
            importlib.import_module(f"migrator.cli.{module}").add(verbs)
    return made


def main(arguments: Sequence[str], verb: str = "") -> int:
    """Runs the verb that these arguments name. Every failure is reported here, once. Returns the exit code."""
    _prepare_streams()
    debug = os.environ.get("MIGRATOR_DEBUG") == "1"
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(name)s: %(message)s")
    own, command = _split(arguments)
    try:
        options = parser(verb).parse_args(own)
        if command is not None and not options.takes_command:
            raise Usage("this verb does not take a command after --", remedy="remove -- and what follows it")
        options.command = command or []
        code: int = options.act(options)
        sys.stdout.flush()
        return code
    except SnapshotError as error:
        failure = error
    except Exception as error:  # the one place that reports defects
        if isinstance(error, BrokenPipeError):
            raise
        failure = Internal(
            f"{type(error).__name__}: {error}",
            remedy="this is a defect: run again with MIGRATOR_DEBUG=1 for a traceback; `migrator status` shows the moves",
        )
        failure.__cause__ = error
    if debug:
        traceback.print_exception(failure)
    output.failure(failure, as_json="--json" in own)
    return failure.exit_code


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own arguments, and the command after `--`, which is never parsed as ours."""
    words = list(arguments)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _prepare_streams() -> None:
    """On a terminal that cannot show an arrow, print a question mark instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
