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


def process_path(pid: int, name: str, thread: int | None = None) -> str:
    """The path of a file of a process, or of one of its threads."""
    return f"/proc/{pid}/{name}" if thread is None else f"/proc/{pid}/task/{thread}/{name}"


def parse_fields(text: str) -> dict[str, str]:
    """The `Name: value` lines of status, smaps_rollup, fdinfo and meminfo."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}
