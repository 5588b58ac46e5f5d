"""/proc/PID/ns: the namespaces that a process is in."""

from __future__ import annotations

import os


def read(pid: int | str, kind: str) -> str:
    """The kernel's name of a namespace, `net:[4026531840]`; empty if this kernel has no such kind.

    `pid` may be "self". Raises FileNotFoundError or ProcessLookupError if the process has ended.
    """
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/ns"):
            return ""
        raise
