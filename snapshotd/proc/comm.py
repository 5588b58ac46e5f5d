"""/proc/PID/comm: the names of processes and threads."""

from __future__ import annotations

import os

from snapshotd.proc.files import GONE, process_path, read_text


def read(pid: int, thread: int | None = None) -> str:
    """Raises FileNotFoundError or ProcessLookupError if it has ended."""
    return read_text(process_path(pid, "comm", thread)).strip()


def name_or(pid: int, otherwise: str) -> str:
    """The name of a process for a message; `otherwise` if it has ended."""
    try:
        return read(pid)
    except GONE:
        return otherwise


def thread_names(pid: int) -> dict[int, str]:
    """Thread id -> name. Threads that end meanwhile are left out. Raises as `read` does if the process has ended."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            found[int(thread)] = read(pid, int(thread))
        except GONE:
            continue
    return found
