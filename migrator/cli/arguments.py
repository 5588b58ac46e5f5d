"""What the verbs share: global options, types of arguments, the choice of the cluster, the list of exit codes.

Invariant: a value that reaches a verb is well-formed. Anything else ends as Usage (exit code 2) with the reason. No name from
the command line is used in a path or on the network before it was checked.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from migrator import users
from snapshotd.api.errors import BY_CODE, SnapshotError, Usage

if TYPE_CHECKING:
    from migrator.cluster import Cluster

MAX_RANK = 1 << 24

_JOB = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_RANK_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}-[0-9]{1,9}-[0-9a-f]{8}")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_MOVE = re.compile(r"m-[0-9a-f]{12}")

Act = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Raises Usage where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise Usage(message, remedy=f"see `{self.prog} --help`")


class Verbs:
    """Each verb's file adds its own parser here."""

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
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_global_options(parser)
        parser.set_defaults(act=act, takes_command=takes_command)
        return parser


def add_global_options(parser: argparse.ArgumentParser) -> None:
    """Adds options that are accepted before and after the verb: SUPPRESS keeps a default from overwriting a given value."""
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of text"
    )
    parser.add_argument(
        "--cluster",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="cluster file to use (default: $MIGRATOR_CLUSTER, the user's, the system's, the running lab's)",
    )
    parser.add_argument(
        "--lab", metavar="NAME", default=argparse.SUPPRESS, help="lab to use (default: the one that is running)"
    )


def add_limits(parser: argparse.ArgumentParser, what: str, by: str, lease_s: float) -> None:
    """Adds --timeout and --lease, for what is undone unless it reaches COMMIT: by the command, or `by` if that is silent."""
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="S",
        help=f"undo {what} if it has not reached COMMIT after S seconds",
    )
    parser.add_argument(
        "--lease",
        type=positive_seconds,
        metavar="S",
        default=lease_s,
        help=f"let {by} undo {what}, before COMMIT, if this command is silent for S seconds (default: %(default)s)",
    )


def exit_codes() -> str:
    """The table of exit codes, generated from the error classes."""
    rows = {error.exit_code: error for error in sorted(BY_CODE.values(), key=lambda error: error.exit_code)}
    return "\n".join(["exit codes:", "    0  done", *(_exit_code(error) for error in rows.values())])


def _exit_code(error: type[SnapshotError]) -> str:
    meaning = _MEANING.get(error.code) or (error.__doc__ or "").strip().splitlines()[0]
    return f"  {error.exit_code:>3}  {error.code:<12} {meaning}"


#: The text for a class without a docstring, or with one that is written for readers of the code.
_MEANING = {
    "internal": "unexpected failure: a defect",
    "usage": "invalid command line",
    "bad-config": "invalid configuration file",
    "refused": "refused by a preflight check; nothing was paused",
    "undone": "failed before COMMIT and undone; the rank continues on the source",
    "unreachable": "a daemon does not answer",
    "unknown": "the outcome could not be determined; the daemons settle the move, at most one copy runs",
    "not-found": "no such rank, node, move or file",
    "ambiguous": "several ranks match; name the job and its user",
    "busy": "the rank is already being moved",
    "denied": "the certificate does not allow this call",
    "full": "not enough memory on the target",
    "damaged": "data or a message arrived damaged",
    "criu-failed": "CRIU failed; its log is quoted",
    "rank-gone": "the rank ended during the move",
    "timeout": "time limit exceeded",
    "wrong-state": "the move is in a state that does not allow this",
    "gpu-failed": "the CUDA driver failed; its error is quoted",
    "nccl-failed": "NCCL failed; the process and the communicator are named",
}


def rank_or_id(text: str) -> int | str:
    """A rank's number in its job, or its id, which `migrator ps` shows."""
    return text if _RANK_ID.fullmatch(text) else rank(text)


def rank(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_RANK:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a rank: use a number from 0 on")


def job(text: str) -> str:
    if _JOB.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text[:80]!r} is not a valid job name: use letters, digits, '_', '.', '-'; at most 60"
    )


def user(text: str) -> int:
    try:
        return users.id_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a valid node name")


def absolute_path(text: str) -> str:
    if text.startswith("/") and "\0" not in text and len(text) < 4096:
        return text.rstrip("/") or "/"
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not an absolute path")


def move(text: str) -> str:
    if _MOVE.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text[:40]!r} is not a move id (m- and 12 hexadecimal digits); `migrator history` lists moves"
    )


def move_or_rank_id(text: str) -> str:
    """A move's id, or the id of a rank, which stands for its newest move."""
    return text if _RANK_ID.fullmatch(text) else move(text)


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
    """The selected cluster, ready for requests. Call it before any thread or channel exists: it may switch namespaces."""
    from migrator.cluster import Cluster

    path = getattr(options, "cluster", None)
    lab = getattr(options, "lab", None)
    if path and lab:
        raise Usage("--cluster and --lab both select a cluster", remedy="give only one of them")
    if lab:
        from migrator.lab import Lab

        path = Lab(lab).cluster_path
    cluster = Cluster.load(path)
    cluster.enter()
    return cluster
