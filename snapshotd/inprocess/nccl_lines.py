"""The lines of requests to the shim about NCCL. Their parts come from the wire, and are checked before they are used."""

from __future__ import annotations

import re

from snapshotd.api.errors import Damaged

COMM = re.compile(r"[0-9a-f]{16}")
UNIQUE_ID = re.compile(r"[0-9a-f]{256}")
_TARGET = re.compile(r"[0-9a-f]{16} [csr] -?[0-9]{1,9} [0-9]{1,19}")


def check_comm(comm: str) -> str:
    """Checks an id from the wire before it is passed to a process."""
    if not COMM.fullmatch(comm):
        raise Damaged(f"{comm[:40]!r} is not the id of a communicator")
    return comm


def attach_line(comm: str, unique_id: str, *, untried: bool) -> str:
    """A line for `attach`, from the wire. Untried: two members share a GPU, where an all-reduce may never end."""
    if not UNIQUE_ID.fullmatch(unique_id):
        raise Damaged(f"{unique_id[:40]!r} is not an NCCL id in hex")
    return f"{check_comm(comm)} {unique_id} {'untried' if untried else 'try'}"


def target_line(comm: str, kind: str, peer: int, count: int) -> str:
    """A line for `set_targets`, from the wire."""
    line = f"{comm} {kind} {peer} {count}"
    if not _TARGET.fullmatch(line):
        raise Damaged(f"{line[:60]!r} is not a target (COMM c|s|r PEER COUNT)")
    return line


def permission_line(thread: int, passed: int, until: str) -> str:
    """A line for `set_targets` that lets a thread (0: any) pass with any group until the channel has its target, or until so
    many groups have passed."""
    if thread < 0 or passed >= 1 << 63:
        raise Damaged(f"{thread} and {passed} are not the thread and limit of a permission")
    return f"permit {thread} {passed} {until}"
