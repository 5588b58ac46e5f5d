"""Which processes outside the rank's tree have the same objects open or mapped as the rank.

One pass over /proc, for the given objects only. A move would silently separate the rank from a process that shares an
object with it and stays behind.

A process can make its list of mappings unreadable. One of the rank's own user then stops the move. One of another user is
skipped, and so are the mappings of that user's other processes: otherwise any user could stop the moves of all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from snapshotd.api.errors import Timeout
from snapshotd.preflight.objects import Object
from snapshotd.preflight.process_info import ProcessInfo, read_identity
from snapshotd.proc import fuse, maps, status
from snapshotd.proc.fd import read_links
from snapshotd.proc.files import GONE

log = logging.getLogger(__name__)

#: For the mappings of a process that is not the rank's: reading them takes about a millisecond.
_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    process: ProcessInfo
    how: str  # "has it open" or "maps it"

    def __str__(self) -> str:
        return f"{self.process} {self.how}"


#: An object: a link such as pipe:[7], or the device and inode of a file.
Held = str | tuple[int, int]


def find_outsiders(
    inside: Collection[int], links: Collection[str], files: Iterable[Object]
) -> dict[Held, list[Holder]]:
    """The outside holders of each object. `links` match by text (pipe:[…], socket:[…]), `files` by device and inode."""
    things = list(files)
    wanted = {thing.inode for thing in things}
    names = {name for thing in things for name in (thing.link, thing.path)}
    found: dict[Held, list[Holder]] = {}
    ours, silent = {owner for pid in inside if (owner := _owner(pid)) is not None}, set[int | None]()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in inside:
            continue
        pid = int(entry)
        try:
            hits = _open_hits(pid, links, names, wanted)
            owner = _owner(pid)
            if wanted and owner not in silent:
                try:
                    hits |= _mapped_hits(pid, wanted)
                except Timeout as error:
                    if owner in ours:
                        raise
                    silent.add(owner)
                    log.warning("what processes of user %s map is not known: %s", owner, error.message)
            holder = read_identity(pid) if hits else None
        except GONE:
            continue
        except PermissionError:
            continue  # a sandbox that not even root may inspect shares nothing with a user's job
        if holder is not None:
            for held, how in hits.items():
                found.setdefault(held, []).append(Holder(holder, how))
    return found


def _owner(pid: int) -> int | None:
    try:
        return status.read(pid).user_id
    except GONE:
        return None


def _open_hits(
    pid: int, links: Collection[str], names: Collection[str], wanted: Collection[tuple[int, int]]
) -> dict[Held, str]:
    hits: dict[Held, str] = {}
    for number, link, _ in read_links(pid):
        if link in links:
            hits[link] = "has it open"
        elif link in names:
            stat = fuse.stat_in_memory(f"/proc/{pid}/fd/{number}")  # it may be on any user's file system
            if (stat.st_dev, stat.st_ino) in wanted:
                hits[stat.st_dev, stat.st_ino] = "has it open"
    return hits


def _mapped_hits(pid: int, wanted: Collection[tuple[int, int]]) -> dict[Held, str]:
    return {inode: "maps it" for inode in maps.parse_inodes(maps.read_raw(pid, _LIMIT_S)) if inode in wanted}
