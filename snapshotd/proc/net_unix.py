"""/proc/PID/net/unix: the unix sockets of a network namespace that are bound to a name."""

from __future__ import annotations

import os

from snapshotd.proc.files import read_bytes


def parse(text: bytes) -> dict[int, str]:
    """inode -> name; an abstract name begins with @."""
    rows = (line.split(None, 7) for line in text.splitlines()[1:])
    return {int(row[6]): os.fsdecode(row[7]) for row in rows if len(row) == 8}


def read(pid: int) -> dict[int, str]:
    """The bound unix sockets of the network namespace that `pid` is in."""
    return parse(read_bytes(f"/proc/{pid}/net/unix"))
