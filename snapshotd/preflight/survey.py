"""The FileFacts that the target needs, made from the objects of a tree: which files must exist there, and which are moved.

A fact with `mtime_ns` 0 requires only that the path exists with that mode. Carried directories come first, parents before
children, as facts whose mode is a directory's: the target creates them before the files.
"""

from __future__ import annotations

import errno
import os
import stat as mode_of
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snapshotd.api.snapshotd_pb2 import FileFact
from snapshotd.files import paths
from snapshotd.files.held import Held, open_readable
from snapshotd.preflight.digest import content_digest
from snapshotd.preflight.objects import Kind, Object, is_carried, is_pseudo, is_utf8
from snapshotd.preflight.process_info import ProcessTree
from snapshotd.proc.maps import DELETED


@dataclass
class Survey:
    """The files of a tree, and those that cannot be moved."""

    facts: list[FileFact] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    image_bytes: int = 0  # of unlinked files and shared memory, which CRIU stores in the image
    carried_bytes: int = 0
    unnameable: list[str] = field(default_factory=list)  # the name is not UTF-8
    nameless: list[str] = field(
        default_factory=list
    )  # the name was removed; other names remain, but it cannot be moved under one of them
    hidden: list[str] = field(default_factory=list)  # the path leads to another file
    foreign_proc: list[str] = field(default_factory=list)  # /proc/PID of a process outside the rank
    held: dict[str, Held] = field(default_factory=dict)  # regular files by their paths, as the rank itself has them


def survey(tree: ProcessTree, objects: Sequence[Object], carry_paths: Sequence[str], bound: Iterable[str]) -> Survey:
    """Classifies the objects. `bound` are the names of the tree's unix sockets, which CRIU binds again."""
    root = paths.open_root(tree.root_pid)
    try:
        return _survey(tree, objects, carry_paths, bound, root)
    finally:
        os.close(root)


def _survey(
    tree: ProcessTree, objects: Sequence[Object], carry_paths: Sequence[str], bound: Iterable[str], root: int
) -> Survey:
    found = Survey()
    inside = {str(process.pid_inside) for process in tree.processes.values()}
    folders: set[str] = {"/"}
    folders.update(process.cwd for process in tree.alive if not process.cwd.endswith(DELETED))
    folders.update(os.path.dirname(path) for path in bound if path.startswith("/"))
    in_image: dict[tuple[int, int], int] = {}
    plain = []
    for thing in objects:
        if not is_utf8(thing.path):
            if thing.stat is not None:
                found.unnameable.append(str(thing))
            continue
        match thing.kind:
            case Kind.GHOST | Kind.MEMORY:
                in_image[thing.inode] = thing.blocks_bytes
                if thing.kind is Kind.GHOST:
                    folders.add(os.path.dirname(thing.path))
            case Kind.NAMELESS:
                found.nameless.append(str(thing))
            case Kind.PSEUDO:
                if (number := thing.path.split("/")[2:3]) and number[0].isdigit():
                    if thing.path.startswith("/proc/") and number[0] not in inside:
                        found.foreign_proc.append(str(thing))
                elif thing.path.startswith("/sys/"):
                    plain.append(thing)
            case Kind.DIRECTORY:
                if not thing.link.endswith(DELETED):
                    folders.add(thing.path)
            case Kind.FILE | Kind.FIFO:
                if _is_hidden(thing, root) and _still_has_this_name(thing):
                    found.hidden.append(str(thing))
                plain.append(thing)
    found.image_bytes = sum(in_image.values())
    found.directories = sorted(folder for folder in folders if is_utf8(folder) and not is_pseudo(folder))
    found.facts = carried_facts(objects, found.directories, carry_paths, root)
    found.held = _held(objects, found.facts)
    carried = {thing.path: thing for thing in plain if is_carried(thing.path, carry_paths)}
    found.carried_bytes = sum(_moved_bytes(thing) for thing in carried.values())
    for thing in plain:
        if not is_carried(thing.path, carry_paths):
            found.facts.append(fact := fact_of(thing))
            if thing.writable and not thing.mapped:
                fact.folder_inode = _inode(root, os.path.dirname(thing.path))
            found.held |= _held([thing], [fact])
    return found


def carried_facts(
    objects: Iterable[Object], directories: Iterable[str], carry_paths: Sequence[str], root: int
) -> list[FileFact]:
    """What is moved with the rank: directories first, then files and FIFOs. `root` is the rank's root directory."""
    things: dict[str, list[Object]] = {}  # the same file can be found by its name and by a removed name
    for thing in objects:
        if thing.kind in (Kind.FILE, Kind.FIFO) and is_carried(thing.path, carry_paths) and is_utf8(thing.path):
            things.setdefault(thing.path, []).append(thing)
    folders: set[str] = set()
    for folder in [*directories, *(os.path.dirname(path) for path in things)]:
        parent = folder
        while is_carried(parent, carry_paths) and parent not in folders:
            folders.add(parent)
            parent = os.path.dirname(parent)
    facts = []
    for folder in sorted(folders):
        try:
            stat = paths.look_inside(root, folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            continue  # removed, or swapped for a link: not the rank's directory
        facts.append(FileFact(path=folder, mode=stat.st_mode, carried=True, user_id=stat.st_uid, group_id=stat.st_gid))
    for _, same in sorted(things.items()):
        facts.append(fact := fact_of(same[-1], carried=True))
        fact.writable = any(thing.writable for thing in same)
        fact.mapped = any(thing.mapped for thing in same)
    return facts


def fact_of(thing: Object, carried: bool = False) -> FileFact:
    stat = thing.stat
    if stat is None:
        return FileFact(path=thing.path)
    compared = thing.kind is Kind.FILE
    return FileFact(
        path=thing.path,
        size=stat.st_size if compared else 0,
        mtime_ns=stat.st_mtime_ns if compared else 0,
        mode=stat.st_mode,
        writable=thing.writable,
        mapped=thing.mapped,
        carried=carried,
        user_id=stat.st_uid,
        group_id=stat.st_gid,
    )


def _held(objects: Iterable[Object], facts: Iterable[FileFact]) -> dict[str, Held]:
    """How the rank itself has these regular files. A handle that is open for reading is preferred."""
    wanted = {fact.path for fact in facts if mode_of.S_ISREG(fact.mode)}
    inodes: dict[str, tuple[int, int]] = {}
    found: dict[str, Held] = {}
    for thing in reversed(list(objects)):  # the last one with a path is the one that its fact describes
        if (
            thing.kind is Kind.FILE
            and thing.path in wanted
            and thing.inode == inodes.setdefault(thing.path, thing.inode)
        ):
            known = found.get(thing.path)
            if known is None or (thing.readable and not known.readable):
                found[thing.path] = Held(thing.handle, thing.inode, thing.readable)
    return found


def add_digests(facts: Iterable[FileFact], held: Mapping[str, Held], seconds: float) -> None:
    """Adds digests of files that the target may have already: mapped files first, small ones first, until the time is up.

    A file without a digest can still be recognised as identical by size and time, as on a shared file system. Digests are
    cached, so the next preflight gets further. Files are read as the rank itself has them: a path may lead elsewhere by now.
    """
    deadline = time.monotonic() + seconds
    wanted = [fact for fact in facts if fact.mtime_ns and not fact.writable and mode_of.S_ISREG(fact.mode)]
    for fact in sorted(wanted, key=lambda fact: (not fact.mapped, fact.size)):
        if time.monotonic() > deadline:
            return
        try:
            handle = open_readable(held[fact.path])
        except (OSError, KeyError):
            continue  # the target compares size and time instead
        try:
            fact.digest = content_digest(handle, fact.size, deadline)
        except OSError:
            continue
        finally:
            os.close(handle)


def _inode(root: int, path: str) -> int:
    try:
        return paths.look_inside(root, path).st_ino
    except OSError:
        return 0


def _moved_bytes(thing: Object) -> int:
    return min(thing.stat.st_size, thing.blocks_bytes) if thing.stat and thing.kind is Kind.FILE else 0


def _is_hidden(thing: Object, root: int) -> bool:
    """Whether the path leads to another file: it is covered by a mount, or was replaced without a deleted mark."""
    try:
        named = paths.look_inside(root, thing.path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return True
    stat = thing.stat
    if stat is None or (named.st_dev, named.st_ino) == thing.inode:
        return False
    # overlayfs may give one file two inode numbers; the same size and time under the same name is the same file
    return (named.st_size, named.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns)


def _still_has_this_name(thing: Object) -> bool:
    """False for a file that was renamed or closed meanwhile (a finished checkpoint): it is checked after the freeze."""
    try:
        return os.readlink(thing.handle) == thing.link
    except OSError:
        return False
