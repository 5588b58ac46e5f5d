"""/proc/PID/statm and /proc/PID/smaps_rollup: how much memory a process has."""

from __future__ import annotations

import os

from snapshotd.proc import foreign_memory
from snapshotd.proc.files import parse_fields, read_text

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN = ("Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb")


def parse_resident(statm: str) -> int:
    return int(statm.split()[1]) * _PAGE_BYTES


def resident_bytes(pid: int) -> int:
    """Raises FileNotFoundError or ProcessLookupError if the process has ended."""
    return parse_resident(read_text(f"/proc/{pid}/statm"))


def parse_anonymous(smaps_rollup: str) -> int:
    fields = parse_fields(smaps_rollup)
    return 1024 * sum(int(fields.get(name, "0").split()[0]) for name in _OWN)


def anonymous_bytes(pid: int) -> int:
    """Memory that no file backs, swapped pages and huge pages included.

    Pages that a fork shares are counted in full. Raises FileNotFoundError or ProcessLookupError if the process has ended.
    """
    return parse_anonymous(os.fsdecode(foreign_memory.read_file(pid, "smaps_rollup")))
