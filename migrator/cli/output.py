"""Output for people and programs: tables, one JSON object, errors of three lines.

Invariant: with --json, stdout has exactly one JSON object, on one line. Control characters in text that came from a daemon or
a job, bidirectional ones included, are replaced (in JSON: escaped) before it is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from migrator import formatting
from migrator.fan_out import none_answered
from snapshotd.api.errors import SnapshotError, Where

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def json_object(value: Mapping[str, Any]) -> None:
    print(formatting.json_line(value), flush=True)


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """One line, coloured if the stream is a terminal and colours are not disabled (NO_COLOR, TERM=dumb)."""
    text = formatting.plain(text)
    to = sys.stdout if stream is None else stream
    if not to.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    indent: int = 0,
    style: str = "",
) -> None:
    """Aligned columns. On a terminal that is too narrow, long cells end with an ellipsis."""
    show(columns(heads, rows, right=right, style=style), indent=indent)


def columns(
    heads: Sequence[str], rows: Sequence[Sequence[str | tuple[str, str]]], *, right: Sequence[str] = (), style: str = ""
) -> Table:
    """The same, to be shown later. A cell can be (text, style)."""
    from rich.table import Table  # here: loading it takes longer than most verbs

    made = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", style=style)
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left")
    for row in rows:
        made.add_row(*(_cell(cell) if isinstance(cell, str) else _cell(*cell) for cell in row))
    return made


def grid(rows: Sequence[Sequence[str | tuple[str, str]]]) -> None:
    """Aligned cells without heads; a cell can be (text, style) and have several lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 1))
    for row in rows:
        made.add_row(*(_cell(cell) if isinstance(cell, str) else _cell(*cell) for cell in row))
    show(made)


def _cell(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text("\n".join(formatting.plain_lines(text)), style, no_wrap=True, overflow="ellipsis")


def show(made: RenderableType, *, indent: int = 0) -> None:
    """Prints it, without blanks at the ends of lines."""
    from rich.console import Console
    from rich.padding import Padding

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else 100_000)
    with console.capture() as captured:
        console.print(Padding.indent(made, indent))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def where_words(where: Where, source: str = "", target: str = "") -> str:
    """ "running on source (node-2)": with the node's name if it is known."""
    name = {
        Where.SOURCE_RUNNING: source,
        Where.SOURCE_FROZEN: source,
        Where.TARGET_HELD: target,
        Where.TARGET_RUNNING: target,
    }.get(where, "")
    return f"{where} ({formatting.plain(name)})" if name else str(where)


def trouble(message: str, remedy: str, where: str) -> None:
    """An error on stderr: what happened, where the rank is, what to do."""
    first, *rest = formatting.plain_lines(message) or [""]
    print(f"{styled('migrator:', 'red', sys.stderr)} {first}", file=sys.stderr)
    for line in rest:
        print(line, file=sys.stderr)
    print(f"  the rank is: {where}", file=sys.stderr)
    print(f"  remedy: {formatting.plain(remedy)}", file=sys.stderr, flush=True)


def failure(error: SnapshotError, *, as_json: bool) -> None:
    """Reports an error, as text or as JSON."""
    if as_json:
        json_object(error_object(error))
    else:
        trouble(error.message, error.advice, where_words(error.where))


def error_object(error: SnapshotError) -> dict[str, str]:
    return {"error": error.code, "message": error.message, "remedy": error.advice, "where": error.where.value}


def warn_silent(silent: Mapping[str, SnapshotError], total: int, *, as_json: bool) -> None:
    """Warns of nodes that did not answer. Raises if none of the `total` nodes did."""
    if silent and len(silent) == total:
        raise none_answered(dict(silent))
    if not as_json:
        for node, error in silent.items():
            first = formatting.plain(error.message.split("\n", maxsplit=1)[0])
            print(f"{styled('warning:', 'yellow', sys.stderr)} {node}: {first}", file=sys.stderr)


def silent_objects(silent: Mapping[str, SnapshotError]) -> list[dict[str, str]]:
    return [{"node": node, **error_object(error)} for node, error in silent.items()]
