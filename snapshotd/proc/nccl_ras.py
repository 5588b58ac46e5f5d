"""Recognises the socket at which NCCL's RAS, a service for diagnosis, waits for clients.

A move closes it, and NCCL opens another.
"""

from __future__ import annotations

from snapshotd.proc import environ, maps
from snapshotd.proc.files import GONE

#: Unless NCCL_RAS_ADDR names another one. Only one process of a node has it.
PORT = 28028


def port(pid: int) -> int:
    given = _environment(pid).get("NCCL_RAS_ADDR", "").rpartition(":")[2]
    return int(given) if given.isdecimal() and len(given) < 6 else PORT


def is_on(pid: int) -> bool:
    """As the process was started. NCCL's default is 1."""
    return _environment(pid).get("NCCL_RAS_ENABLE", "1") != "0"


def waits_at(pid: int, at: int) -> bool:
    """Whether a socket of the process that listens at this port is RAS's."""
    try:
        return port(pid) == at and is_on(pid) and b"/libnccl.so" in maps.read_raw(pid)
    except GONE:
        return False


def _environment(pid: int) -> dict[str, str]:
    try:
        return environ.read(pid)
    except GONE:
        return {}
