"""/proc/PID/environ: the environment that a process was started with."""

from __future__ import annotations

import os

from snapshotd.proc import foreign_memory


def parse(text: str) -> dict[str, str]:
    """The variables by name. Where one is there twice the first counts, as for getenv(3)."""
    found: dict[str, str] = {}
    for entry in text.split("\0"):
        name, equals, value = entry.partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def read(pid: int) -> dict[str, str]:
    """Raises FileNotFoundError or ProcessLookupError if the process has ended."""
    return parse(os.fsdecode(foreign_memory.read_file(pid, "environ")))
