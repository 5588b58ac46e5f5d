"""Defines what a process tree has open and mapped, and its credentials: gathered on the source, compared on the target.

The source gathers it once the rank is frozen and sends it with the image. The target gathers the same of the restored copy,
before anything of it may run, and compares (snapshotd/moves/target/comparison.py).
"""

from __future__ import annotations

import functools
import os
import stat as mode_of
from collections.abc import Iterable, Mapping

import msgspec

from snapshotd.api.snapshotd_pb2 import FileFact
from snapshotd.files import paths
from snapshotd.preflight.objects import Kind, kind_of
from snapshotd.proc import maps, privileges, status
from snapshotd.proc.fd import read_info, read_links
from snapshotd.proc.files import GONE
from snapshotd.proc.privileges import Credentials


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file or kernel object that processes have open or mapped."""

    link: str  # as the kernel names it
    kind: str  # a Kind
    mode: int = 0
    user_id: int = 0
    group_id: int = 0
    device: int = 0  # that a device file stands for
    inode: int = 0
    size: int = 0
    mtime_ns: int = 0
    digest: str = ""  # of the content, if preflight has one; hex
    born_ns: int = 0  # 0: not known

    @property
    def is_named_file(self) -> bool:
        """Whether it is a regular file whose name was not removed."""
        is_named = self.link.startswith("/") and not self.link.endswith(maps.DELETED)
        return self.kind == Kind.FILE.name and mode_of.S_ISREG(self.mode) and is_named


class OpenFile(msgspec.Struct, frozen=True, array_like=True):
    number: int
    flags: int
    file: int  # index


class MappedFile(msgspec.Struct, frozen=True, array_like=True):
    start: int
    end: int
    offset: int
    rights: str  # r-xp
    file: int  # index


class ProcessFacts(msgspec.Struct, frozen=True):
    pid: int  # of the rank's own pid namespace
    credentials: Credentials
    #: Of those threads that have others than the process; by their number in the rank's own pid namespace.
    thread_credentials: dict[int, Credentials]
    cwd: str
    root: str
    program: str
    open_files: list[OpenFile]
    mapped_files: list[MappedFile]


class TreeFacts(msgspec.Struct, frozen=True):
    files: list[File]
    processes: list[ProcessFacts]

    def paths(self) -> set[str]:
        """All paths that criu may open to restore this tree."""
        found = {path for one in self.processes for path in (one.cwd, one.root, one.program)}
        found |= {file.link for file in self.files if file.link.startswith("/")}
        return {path.removesuffix(maps.DELETED) for path in found}


class _Table:
    """The distinct files, each with an index."""

    def __init__(self, digests: Mapping[str, FileFact]) -> None:
        self.files: list[File] = []
        self._index: dict[object, int] = {}
        self._digests = digests
        self._mapped: dict[object, int] = {}

    def add(self, link: str, stat: os.stat_result | None, handle: str) -> int:
        """`handle`: a link of /proc that leads to it."""
        key = (stat.st_dev, stat.st_ino, link) if stat is not None else link
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.files)
            self.files.append(self._file(link, stat, handle))
        return index

    def add_mapped(self, pid: int, mapping: maps.Mapping) -> int:
        """Looks at each file once, although many processes have mapped it: device and inode say that it is the same."""
        key = (mapping.device, mapping.inode, mapping.path)
        index = self._mapped.get(key)
        if index is None:
            in_memory = kind_of(mapping.path, None) is not Kind.ANON  # only its name identifies it
            handle = maps.map_file(pid, mapping)
            stat = None if in_memory else os.stat(handle)
            index = self._mapped[key] = self.add(mapping.path, stat, handle)
        return index

    def _file(self, link: str, stat: os.stat_result | None, handle: str) -> File:
        kind = kind_of(link, stat)
        if stat is None:
            return File(link, kind.name)
        known = self._digests.get(link)
        same = known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        return File(
            link=link,
            kind=kind.name,
            mode=stat.st_mode,
            user_id=stat.st_uid,
            group_id=stat.st_gid,
            device=stat.st_rdev,
            inode=stat.st_ino,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            digest=known.digest.hex() if known is not None and same else "",
            born_ns=paths.born_ns(handle, follow=True) if mode_of.S_ISREG(stat.st_mode) else 0,
        )


def gather(pids: Iterable[int], compared: Iterable[FileFact] = ()) -> TreeFacts:
    """The facts about these processes, which must be frozen; zombies are left out. `compared` has digests. Blocks."""
    table = _Table({fact.path: fact for fact in compared})
    processes = []
    for pid in pids:
        try:
            processes.append(_process(pid, table))
        except GONE:
            continue
    return TreeFacts(table.files, processes)


def _process(pid: int, table: _Table) -> ProcessFacts:
    own = privileges.read(pid)
    others = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        if int(thread) != pid and (found := privileges.read(pid, int(thread))) != own:
            others[status.read(pid, int(thread)).inner_pid] = found
    return ProcessFacts(
        pid=status.read(pid).inner_pid,
        credentials=own,
        thread_credentials=others,
        cwd=os.readlink(f"/proc/{pid}/cwd"),
        root=os.readlink(f"/proc/{pid}/root"),
        program=os.readlink(f"/proc/{pid}/exe"),
        open_files=sorted(_open_files(pid, table), key=lambda one: one.number),
        mapped_files=list(_mapped_files(pid, table)),
    )


def _open_files(pid: int, table: _Table) -> Iterable[OpenFile]:
    for number, link, folder in read_links(pid):
        stat = os.stat(str(number), dir_fd=folder) if link.startswith("/") else None
        yield OpenFile(number, read_info(pid, number).flags, table.add(link, stat, f"/proc/{pid}/fd/{number}"))


def _mapped_files(pid: int, table: _Table) -> Iterable[MappedFile]:
    for mapping in maps.read(pid):
        if mapping.path.startswith("/"):
            yield MappedFile(*_place(mapping), table.add_mapped(pid, mapping))


@functools.lru_cache(maxsize=1 << 14)
def _place(mapping: maps.Mapping) -> tuple[int, int, int, str]:
    """Start, end, offset and rights."""
    bits = (
        (mapping.readable, "r", "-"),
        (mapping.writable, "w", "-"),
        (mapping.executable, "x", "-"),
        (mapping.shared, "s", "p"),
    )
    rights = "".join(yes if on else no for on, yes, no in bits)
    return mapping.start, mapping.start + mapping.size_bytes, mapping.offset, rights
