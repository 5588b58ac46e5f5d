"""Reads /proc/PID/smaps: which mappings of a process are sent while it runs.

Only large private anonymous memory that can be written. Left out is what is pinned or follows other rules at a fork (locked,
MADV_DONTFORK, MADV_WIPEONFORK), what changes its size by itself (stacks), huge pages of the reserved pool, devices, and
what a userfaultfd of the program's own has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Less memory than this in a mapping is left to the pause.
LEAST_BYTES = 1 << 20
#: The kernel's letters: locked, reserved huge pages, DONTFORK, WIPEONFORK, grows down, I/O, page frames, mixed, shared;
#: userfaultfd: missing, minor.
_NOT_SENT = frozenset({b"lo", b"ht", b"dc", b"wf", b"gd", b"io", b"pf", b"mm", b"sh", b"um", b"ui"})
_TRACKED = b"uw"


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    end: int
    present_bytes: int
    shared_bytes: int  # of anonymous pages that another process has, too: after a fork
    tracked: bool  # registered for write protection


def eligible(smaps: bytes) -> Iterator[Mapping]:
    """The mappings that may be sent, in order of address."""
    head: list[bytes] = []
    present = shared = anonymous = 0
    for line in smaps.splitlines():
        key, _, rest = line.partition(b":")
        match key:
            case b"Rss":
                present = _bytes(rest)
            case b"Shared_Dirty" | b"Shared_Clean":
                shared += _bytes(rest)
            case b"Anonymous":
                anonymous = _bytes(rest)
            case b"VmFlags":
                flags = set(rest.split())
                if head and anonymous >= LEAST_BYTES and not flags & _NOT_SENT:
                    start, _, end = head[0].partition(b"-")
                    yield Mapping(int(start, 16), int(end, 16), present, shared, _TRACKED in flags)
            case _ if b"-" in key:
                present = shared = anonymous = 0
                fields = line.split(maxsplit=5)
                plain = len(fields) == 5 or fields[5] == b"[heap]" or fields[5].startswith(b"[anon:")
                head = fields if plain and fields[1].startswith(b"rw") and fields[1].endswith(b"p") else []


def _bytes(rest: bytes) -> int:
    return int(rest.split()[0]) << 10
