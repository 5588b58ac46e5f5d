"""Removes temporary names that a killed criu left in the rank's directories: in a dump, hard links to files whose own name
was removed; in a restore, unlinked files, which are first created under a name.

Criu removes both itself, also after a failure, but not if it is killed. They would stay in /dev/shm for ever, with all their
memory, and a later dump or restore with the same numbers would fail because of them. So the names that criu may create are
recorded before it starts, and searched for afterwards.

Invariant: a name is removed only if it has criu's form and belongs to a recorded file, or was free when it was recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable

log = logging.getLogger(__name__)

_LINK = re.compile(r"link_remap\.\d+")

#: Directory, device and inode of a file that criu may link to.
Linked = tuple[str, int, int]


def linked(names: Iterable[str]) -> list[Linked]:
    """Where criu may make links, given a remaining name of each file. Blocks."""
    found: list[Linked] = []
    for name in sorted(set(names)):
        stat = os.stat(name)
        found.append((os.path.dirname(name), stat.st_dev, stat.st_ino))
    return found


def sweep(files: Iterable[Linked]) -> None:
    """Removes what a killed dump left beside these files. Criu must have exited. Blocks."""
    inodes: dict[str, set[tuple[int, int]]] = {}
    for folder, device, inode in files:
        inodes.setdefault(folder, set()).add((device, inode))
    for folder, wanted in inodes.items():
        with contextlib.suppress(FileNotFoundError):  # the whole directory is gone
            for name in filter(_LINK.fullmatch, os.listdir(folder)):
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    stat = os.lstat(path)
                    if (stat.st_dev, stat.st_ino) in wanted:
                        os.unlink(path)
                        log.warning("removed %s, a link that criu left", path)


#: The former name of an unlinked file, and the one under which criu creates it.
Ghost = tuple[str, str]


def free(ghosts: Iterable[Ghost]) -> list[Ghost]:
    """Those whose name in the restore does not exist yet. Blocks."""
    return [ghost for ghost in ghosts if not os.path.lexists(ghost[1])]


def sweep_ghosts(ghosts: Iterable[Ghost]) -> None:
    """Removes what a killed restore left of these. Criu must have exited. Blocks."""
    for name, made in dict.fromkeys(ghosts):
        with contextlib.suppress(FileNotFoundError):
            stat = os.lstat(made)
            for path in (name, f"{name}.cr_link"):  # it is opened by one of these names, which is then removed
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(stat, os.lstat(path)):
                        os.unlink(path)
            os.unlink(made)
            log.warning("removed %s, an unlinked file that criu left", made)
