"""Removes temporary names that a killed criu left in the rank's directories: in a dump, hard links to files whose own name
was removed; in a restore, unlinked files, which are first created under a name.

Criu removes both itself, also after a failure, but not if it is killed. They would stay in /dev/shm for ever, with all their
memory, and a later dump or restore with the same numbers would fail because of them. So the names that criu may create are
recorded before it starts, and searched for afterwards.

Invariant: a name is removed only if it has criu's form and belongs to a recorded file, or was free when it was recorded. Each
directory is resolved once, through no link of a user: root removes files there whose directory a user may swap meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator

from snapshotd.files import paths

log = logging.getLogger(__name__)

_LINK = re.compile(r"link_remap\.\d+")

#: Directory, device and inode of a file that criu may link to.
Linked = tuple[str, int, int]


def sweep(files: Iterable[Linked]) -> None:
    """Removes what a killed dump left beside these files. Criu must have exited. Blocks."""
    inodes: dict[str, set[tuple[int, int]]] = {}
    for path, device, inode in files:
        inodes.setdefault(path, set()).add((device, inode))
    for path, wanted in inodes.items():
        with _folder(path) as folder:
            for name in filter(_LINK.fullmatch, os.listdir(folder) if folder is not None else ()):
                assert folder is not None
                here = paths.look_in(folder, name)
                if here is not None and (here.st_dev, here.st_ino) in wanted:
                    _unlink(folder, name)
                    log.warning("removed %s/%s, a link that criu left", path, name)


#: The former name of an unlinked file, and the one under which criu creates it.
Ghost = tuple[str, str]


def free(ghosts: Iterable[Ghost]) -> list[Ghost]:
    """Those whose name in the restore does not exist yet. Blocks."""
    return [ghost for ghost in ghosts if paths.look(ghost[1]) is None]


def sweep_ghosts(ghosts: Iterable[Ghost]) -> None:
    """Removes what a killed restore left of these. Criu must have exited. Blocks."""
    for path, made_path in dict.fromkeys(ghosts):
        (parent, name), made = os.path.split(path), os.path.basename(made_path)
        with _folder(parent) as folder:
            here = paths.look_in(folder, made) if folder is not None else None
            if folder is None or here is None:
                continue
            for other in (name, f"{name}.cr_link"):  # it is opened by one of these names, which is then removed
                there = paths.look_in(folder, other)
                if there is not None and os.path.samestat(here, there):
                    _unlink(folder, other)
            _unlink(folder, made)
            log.warning("removed %s, an unlinked file that criu left", made_path)


@contextlib.contextmanager
def _folder(path: str) -> Iterator[int | None]:
    """A descriptor of a directory; None if it is gone, or a user has put a link in its place."""
    try:
        handle = paths.open_folder(path)
    except OSError as error:
        log.debug("%s is not searched for names that criu left: %s", path, error)
        yield None
        return
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield readable
    finally:
        os.close(readable)


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
