"""Reading files of /proc, and the `Name: value` form that many of them have."""

from __future__ import annotations

import os

#: What reading a file of a process raises if the process has ended: at open, or at read.
GONE = (FileNotFoundError, ProcessLookupError)


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read_text(path: str) -> str:
    """The text of a file. Bytes that are not UTF-8 (names of processes and paths can be any bytes) are kept as surrogates."""
    return os.fsdecode(read_bytes(path))


def lines(text: str) -> list[str]:
    """The lines of a file of /proc.

    The kernel escapes newlines in names that users choose, but no other character at which `str.splitlines` splits: with
    it, a mount point or a cgroup with a form feed in its name would make two lines out of one.
    """
    return text.removesuffix("\n").split("\n") if text else []


def process_path(pid: int, name: str, thread: int | None = None) -> str:
    """The path of a file of a process, or of one of its threads."""
    return f"/proc/{pid}/{name}" if thread is None else f"/proc/{pid}/task/{thread}/{name}"


def parse_fields(text: str) -> dict[str, str]:
    """The `Name: value` lines of status, smaps_rollup, fdinfo and meminfo."""
    rows = (line.partition(":") for line in lines(text))
    return {name: value.strip() for name, _, value in rows}
