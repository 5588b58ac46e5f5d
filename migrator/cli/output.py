"""How results reach people and programs: tables, one JSON object, errors in three lines.

Invariant: with --json stdout holds exactly one JSON object, on one line. Text that came from a daemon or a job is made
harmless before a terminal sees it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from migrator import formatting
from migrator.fan_out import none_answered
from snapshotd.api.errors import SnapshotError, Where

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def json_object(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """With colour on a terminal that wants it."""
    to = sys.stdout if stream is None else stream
    if not to.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Aligned columns; on a terminal the last one is cut at its edge."""
    cells = [[formatting.plain(cell) for cell in row] for row in rows]
    widths = [max(len(line[index]) for line in [list(heads), *cells]) for index in range(len(heads))]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        return "  ".join(parts).rstrip()[:edge]

    print(styled(line(heads), "bold"))
    for row in cells:
        print(line(row))


def where_words(where: Where, source: str = "", target: str = "") -> str:
    """ "running on source (node-2)": with the node's name where it is known."""
    name = {
        Where.SOURCE_RUNNING: source,
        Where.SOURCE_FROZEN: source,
        Where.TARGET_HELD: target,
        Where.TARGET_RUNNING: target,
    }.get(where, "")
    return f"{where} ({formatting.plain(name)})" if name else str(where)


def trouble(message: str, remedy: str, where: str) -> None:
    """What went wrong, on stderr: what happened, what to do, where the rank is."""
    first, *rest = formatting.plain_lines(message) or [""]
    print(f"{styled('migrator:', 'red', sys.stderr)} {first}", file=sys.stderr)
    for line in rest:
        print(line, file=sys.stderr)
    print(f"  remedy: {formatting.plain(remedy)}", file=sys.stderr)
    print(f"  the rank is: {where}", file=sys.stderr, flush=True)


def failure(error: SnapshotError, *, as_json: bool) -> None:
    """An error of the taxonomy, as people or programs read it."""
    if as_json:
        json_object(error_object(error))
    else:
        trouble(error.message, error.advice, where_words(error.where))


def error_object(error: SnapshotError) -> dict[str, str]:
    return {"error": error.code, "message": error.message, "remedy": error.advice, "where": error.where.value}


def warn_silent(silent: Mapping[str, SnapshotError], total: int, *, as_json: bool) -> None:
    """Says which nodes did not answer; raises when none of `total` did."""
    if silent and len(silent) == total:
        raise none_answered(dict(silent))
    if not as_json:
        for node, error in silent.items():
            first = formatting.plain(error.message.split("\n", maxsplit=1)[0])
            print(f"{styled('warning:', 'yellow', sys.stderr)} {node}: {first}", file=sys.stderr)


def silent_objects(silent: Mapping[str, SnapshotError]) -> list[dict[str, str]]:
    return [{"node": node, **error_object(error)} for node, error in silent.items()]
