"""Who else, outside the rank's tree, holds what the rank holds.

One pass over /proc, only for what was asked. Whatever is shared with a process that stays behind would be torn in two
by a move, silently: that is why every finding is a refusal and not a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from snapshotd.preflight.objects import Object
from snapshotd.proc.processes import Process, read_identity, read_links

#: device and inode in a line of /proc/PID/maps
_FILE = re.compile(rb"^\S+ \S{4} \S+ ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Holder:
    process: Process
    how: str  # "has it open" or "maps it"

    def __str__(self) -> str:
        return f"{self.process} {self.how}"


#: What is held: a link such as pipe:[7], or the device and inode of a file.
Held = str | tuple[int, int]


def find_outsiders(
    inside: Collection[int], links: Collection[str], files: Iterable[Object]
) -> dict[Held, list[Holder]]:
    """Who outside holds what. `links` match by name (pipe:[…], socket:[…]), `files` by device and inode."""
    things = list(files)
    wanted = {thing.inode for thing in things}
    names = {name for thing in things for name in (thing.link, thing.path)}
    found: dict[Held, list[Holder]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in inside:
            continue
        pid = int(entry)
        try:
            hits = _open_hits(pid, links, names, wanted)
            hits |= _mapped_hits(pid, wanted)
            who = read_identity(pid) if hits else None
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone: it holds nothing
        except PermissionError:
            continue  # a sandbox that not even root may look into shares nothing with a user's job
        if who is not None:
            for held, how in hits.items():
                found.setdefault(held, []).append(Holder(who, how))
    return found


def _open_hits(
    pid: int, links: Collection[str], names: Collection[str], wanted: Collection[tuple[int, int]]
) -> dict[Held, str]:
    hits: dict[Held, str] = {}
    for number, link, folder in read_links(pid):
        if link in links:
            hits[link] = "has it open"
        elif link in names:
            stat = os.stat(str(number), dir_fd=folder)
            if (stat.st_dev, stat.st_ino) in wanted:
                hits[stat.st_dev, stat.st_ino] = "has it open"
    return hits


def _mapped_hits(pid: int, wanted: Collection[tuple[int, int]]) -> dict[Held, str]:
    if not wanted:
        return {}
    with open(f"/proc/{pid}/maps", "rb") as file:
        text = file.read()
    # Other processes' maps are the bulk of the work: device and inode alone, each pair once.
    pairs = {(int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in set(_FILE.findall(text))}
    inodes = {(os.makedev(major, minor), inode) for major, minor, inode in pairs}
    return {inode: "maps it" for inode in inodes if inode in wanted}
