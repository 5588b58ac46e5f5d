"""Excerpts from criu's log for error messages: its `Error` lines with the lines before them."""

from __future__ import annotations

import re
from pathlib import Path

_ERROR = re.compile(r"\bError\b")
#: In every log, also of successful runs: never the cause.
_HARMLESS = re.compile(r"RLIMIT_NOFILE|Unable to load .*apparmor|Could not initialize kernel features detection")


def excerpt(log_path: Path, *, before: int = 2, most_lines: int = 24) -> str:
    """The error lines of a log, each with `before` lines of context; "" if there is no log, or no error in it."""
    try:
        lines = log_path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    wanted: set[int] = set()
    for index, line in enumerate(lines):
        if _ERROR.search(line) and not _HARMLESS.search(line):
            wanted.update(range(max(0, index - before), index + 1))
    picked = sorted(wanted)[:most_lines]
    return "\n".join(f"  criu: {lines[index]}" for index in picked)
