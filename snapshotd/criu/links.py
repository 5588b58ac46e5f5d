"""The names that criu makes in the rank's directories: in a dump, hard links to files whose own name was removed, so that
it has a name for them; in a restore, unlinked files, which are first made under a name.

Criu removes both itself, whether it succeeded or not. One that is killed cannot: they would stay in /dev/shm for ever, with
all their memory, and a later dump or restore that numbers its files alike would fail on them. So what criu may make is
written down before it begins, and looked for afterwards.

Invariant: a name is removed only if criu would give it and it leads to a file that was written down, or was free when it
was.
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
    """Where criu may make links, given a remaining name of each file. Blocking."""
    found: list[Linked] = []
    for name in sorted(set(names)):
        stat = os.stat(name)
        found.append((os.path.dirname(name), stat.st_dev, stat.st_ino))
    return found


def sweep(files: Iterable[Linked]) -> None:
    """Removes what a killed dump left beside these files. Criu is gone when this is called. Blocking."""
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


#: The name an unlinked file had, and the one criu makes it under.
Ghost = tuple[str, str]


def free(ghosts: Iterable[Ghost]) -> list[Ghost]:
    """Those whose name in the restore is nobody's yet. Blocking."""
    return [ghost for ghost in ghosts if not os.path.lexists(ghost[1])]


def sweep_ghosts(ghosts: Iterable[Ghost]) -> None:
    """Removes what a killed restore left of these. Criu is gone when this is called. Blocking."""
    for name, made in dict.fromkeys(ghosts):
        with contextlib.suppress(FileNotFoundError):
            stat = os.lstat(made)
            for path in (name, f"{name}.cr_link"):  # it is opened by one of these, which is then removed again
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(stat, os.lstat(path)):
                        os.unlink(path)
            os.unlink(made)
            log.warning("removed %s, an unlinked file that criu left", made)
