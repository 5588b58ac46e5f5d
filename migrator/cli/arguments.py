"""What the verbs share: options for all of them, checked values, the cluster that is meant, exit codes in every help.

Invariant: a value that reaches a verb is well-formed. What is not ends as Usage (exit code 2) with the reason, and
no name from the command line touches a path or the network before it was checked.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from snapshotd.api.errors import BY_CODE, SnapshotError, Usage

if TYPE_CHECKING:
    from migrator.cluster import Cluster

MAX_RANK = 1 << 24

_JOB = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_MOVE = re.compile(r"m-[0-9a-f]{12}")

Act = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Raises Usage where argparse would end the program itself."""

    def error(self, message: str) -> NoReturn:
        raise Usage(message, remedy=f"see `{self.prog} --help`")


class Verbs:
    """Where each verb's file adds its own parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)

    def add(
        self,
        name: str,
        act: Act | None,
        summary: str,
        *,
        more: str = "",
        examples: str = "",
        takes_command: bool = False,
    ) -> argparse.ArgumentParser:
        parser = self._verbs.add_parser(
            name,
            help=summary,
            description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {more}", 100),
            epilog="\n\n".join(filter(None, (f"examples:\n{examples}" if examples else "", exit_codes()))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_global_options(parser)
        parser.set_defaults(act=act, takes_command=takes_command)
        return parser


def add_global_options(parser: argparse.ArgumentParser) -> None:
    """Before or after the verb: SUPPRESS keeps the one from hiding the other."""
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    parser.add_argument(
        "--cluster", metavar="PATH", default=argparse.SUPPRESS, help="cluster.toml (default: $MIGRATOR_CLUSTER, then …)"
    )
    parser.add_argument("--lab", metavar="NAME", default=argparse.SUPPRESS, help="the lab that is meant")


def exit_codes() -> str:
    """The table of exit codes, printed from the error classes."""
    rows = {error.exit_code: error for error in sorted(BY_CODE.values(), key=lambda error: error.exit_code)}
    return "\n".join(["exit codes:", "    0  done", *(_exit_code(error) for error in rows.values())])


def _exit_code(error: type[SnapshotError]) -> str:
    meaning = _MEANING.get(error.code) or (error.__doc__ or "").strip().splitlines()[0]
    return f"  {error.exit_code:>3}  {error.code:<12} {meaning}"


#: Classes whose name says it all to a reader of the code have no docstring.
_MEANING = {
    "internal": "something that should not happen did: a defect",
    "usage": "the command line makes no sense",
    "bad-config": "a configuration file makes no sense",
    "unreachable": "a daemon does not answer",
    "not-found": "no such rank, node, move, file",
    "ambiguous": "more than one thing is meant",
    "full": "the target has no room",
    "timeout": "it took longer than allowed",
}


def rank(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_RANK:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} cannot be a rank: it is a number from 0 on")


def job(text: str) -> str:
    if _JOB.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text[:80]!r} cannot be the name of a job")


def gpu(text: str) -> str:
    one = r"([0-9]{1,3}|(GPU-)?[0-9A-Fa-f][0-9A-Fa-f-]{3,35})"
    if re.fullmatch(f"{one}(,{one})*", text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text[:80]!r} is neither a GPU's index nor its UUID (`migrator nodes` lists them)"
    )


def node(text: str) -> str:
    if _NODE.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text[:80]!r} cannot be the name of a node")


def move(text: str) -> str:
    if _MOVE.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text[:40]!r} is not a move id; they look like m-0123456789ab, see `migrator history`"
    )


def positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")


def count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")


def wants_json(options: argparse.Namespace) -> bool:
    return bool(getattr(options, "json", False))


def the_cluster(options: argparse.Namespace) -> Cluster:
    """The cluster that is meant, ready to be asked. Comes before any thread or channel: it may change the namespace."""
    from migrator.cluster import Cluster

    path = getattr(options, "cluster", None)
    lab = getattr(options, "lab", None)
    if path and lab:
        raise Usage("--cluster and --lab both say which cluster is meant", remedy="give one of them")
    if lab:
        from migrator.lab import Lab

        path = Lab(lab).cluster_path
    cluster = Cluster.load(path)
    cluster.enter()
    return cluster
