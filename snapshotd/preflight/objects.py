"""The distinct objects behind a tree's descriptors and mappings: each file once, however many processes have it.

A torch process maps one library six times, and its forked workers map it again. Everything that costs a system call is
done once for each object. What kind of object it is, is decided here and nowhere else.
"""

from __future__ import annotations

import os
import re
import stat as mode_of
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from snapshotd.files import paths
from snapshotd.preflight.process_info import ProcessInfo
from snapshotd.proc import fuse
from snapshotd.proc.maps import DELETED, Mapping, map_file

_GPU = re.compile(r"/dev/(nvidia|dri/|kfd|nvmap)")
#: RDMA and other network devices that programs use past the kernel's sockets.
_RDMA = re.compile(r"/dev/(infiniband/|gdrdrv|hfi1|cxi)|anon_inode:\[infinibandevent\]")
#: Caches of sssd and nscd: the daemon of each node writes its own, and libraries map them. A library checks the header at
#: every look-up and starts anew if the cache is another one, so the target's takes the place of the source's.
_NODE_CACHE = re.compile(r"/var/lib/sss/mc/\w+|/var/(cache|db|lib|run)/nscd/\w+|/run/nscd/\w+")
_NFS_LEFTOVER = re.compile(r"^\.nfs[0-9a-f]{8,}")


class Kind(Enum):
    """What an object is, as far as moving it is concerned."""

    FILE = auto()  # a regular file with a name
    GHOST = auto()  # a regular file whose last name was removed: stored in the image
    NAMELESS = auto()  # its name was removed; it has other names, but it cannot be moved under any of them
    MEMORY = auto()  # memfd or anonymous shared memory: stored in the image
    SYSV = auto()
    HUGE = auto()
    AIO = auto()
    PSEUDO = auto()  # /proc and /sys: provided by the target's kernel
    DIRECTORY = auto()
    FIFO = auto()
    GPU = auto()  # the device of a GPU, recognised by its path
    RDMA = auto()  # a device of RDMA or of another network that bypasses the kernel, or the descriptor of its events
    DEVICE = auto()
    ANON = auto()  # anon_inode, pidfd, namespace…: named by its link
    PIPE = auto()
    SOCKET = auto()


@dataclass
class Object:
    kind: Kind
    link: str  # as the kernel names it, " (deleted)" included
    stat: os.stat_result | None
    writable: bool = False
    mapped: bool = False
    executable: bool = False
    shared: bool = False  # mapped shared and writable
    handle: str = ""  # a path under /proc that opens it even if its name was removed
    readable: bool = False  # the handle is a mapping, or a descriptor that was opened for reading
    other_name: str = ""  # of a file whose name was removed: the name under which it is moved
    holders: dict[ProcessInfo, int] = field(default_factory=dict)  # process -> one of its descriptors, -1: mapped only

    @property
    def path(self) -> str:
        return self.other_name or self.removed_name

    @property
    def removed_name(self) -> str:
        return self.link.removesuffix(DELETED)

    @property
    def blocks_bytes(self) -> int:
        return self.stat.st_blocks * 512 if self.stat else 0

    @property
    def inode(self) -> tuple[int, int]:
        return (self.stat.st_dev, self.stat.st_ino) if self.stat else (0, 0)

    def __str__(self) -> str:
        process, number = next(iter(self.holders.items()))
        return f"{process} {'maps' if number < 0 else f'fd {number}:'} {self.link}"


def is_node_cache(path: str) -> bool:
    """Whether a file that is only read may have other content on the target."""
    return _NODE_CACHE.fullmatch(path) is not None


def is_rdma(link: str) -> bool:
    """Whether a link of /proc/PID/fd, or the path of a mapping, is of RDMA."""
    return _RDMA.match(link) is not None


def gather(processes: Iterable[ProcessInfo]) -> list[Object]:
    """All distinct objects of these processes, in the order in which they were found."""
    found: dict[object, Object] = {}
    mapped: dict[tuple[str, int, str], Object] = {}
    for process in processes:
        for descriptor in process.descriptors:
            stat = descriptor.stat
            key: object = (stat.st_dev, stat.st_ino, descriptor.link) if stat else descriptor.link
            if _is_unnamed(descriptor.link):  # they share one link text, but each is a separate object
                key = (process.pid, descriptor.number)
            thing = found.get(key)
            if thing is None:
                handle = f"/proc/{process.pid}/fd/{descriptor.number}"
                thing = found[key] = Object(kind_of(descriptor.link, stat), descriptor.link, stat, handle=handle)
            if descriptor.readable and not thing.readable:
                thing.handle, thing.readable = f"/proc/{process.pid}/fd/{descriptor.number}", True
            thing.writable |= descriptor.writable
            thing.holders.setdefault(process, descriptor.number)
        for mapping in process.mappings:
            thing = mapped.get((mapping.device, mapping.inode, mapping.path))
            if thing is None:
                thing = _mapped_object(process, mapping, found)
                if thing is None:  # unmapped in the meantime
                    continue
                mapped[mapping.device, mapping.inode, mapping.path] = thing
            thing.mapped = True
            thing.executable |= mapping.executable
            thing.shared |= mapping.shared and mapping.writable
            thing.writable |= mapping.shared and mapping.writable
            thing.holders.setdefault(process, -1)
    return list(found.values())


def _mapped_object(process: ProcessInfo, mapping: Mapping, found: dict[object, Object]) -> Object | None:
    handle = map_file(process.pid, mapping)
    stat = None
    if mapping.path.startswith("/") and not mapping.path.startswith("/SYSV"):
        try:
            stat = fuse.stat_link(handle, process.users_devices)
        except FileNotFoundError:
            return None
    key = (stat.st_dev, stat.st_ino, mapping.path) if stat else mapping.path
    thing = found.setdefault(key, Object(kind_of(mapping.path, stat), mapping.path, stat, handle=handle))
    if stat is not None and not thing.readable:  # only a file that is open for reading can be mapped
        thing.handle, thing.readable = handle, True
    return thing


def _is_unnamed(link: str) -> bool:
    return link.startswith("anon_inode:")


def kind_of(link: str, stat: os.stat_result | None) -> Kind:
    """The kind of object that a link of /proc/PID/fd, or the path of a mapping, refers to."""
    for start, kind in (
        ("/memfd:", Kind.MEMORY),
        ("/dev/zero" + DELETED, Kind.MEMORY),
        ("/SYSV", Kind.SYSV),
        ("/anon_hugepage", Kind.HUGE),
        ("/[aio]", Kind.AIO),
        ("pipe:[", Kind.PIPE),
        ("socket:[", Kind.SOCKET),
    ):
        if link.startswith(start):
            return kind
    if is_rdma(link):
        return Kind.RDMA
    if stat is None or not link.startswith("/"):
        return Kind.ANON
    if mode_of.S_ISDIR(stat.st_mode):
        return Kind.PSEUDO if is_pseudo(link) else Kind.DIRECTORY
    if _GPU.match(link):
        return Kind.GPU
    if mode_of.S_ISCHR(stat.st_mode) or mode_of.S_ISBLK(stat.st_mode):
        return Kind.DEVICE
    if mode_of.S_ISFIFO(stat.st_mode):
        return Kind.FIFO
    if mode_of.S_ISSOCK(stat.st_mode):  # O_PATH on a bound socket
        return Kind.FILE
    if is_pseudo(link):
        return Kind.PSEUDO
    if stat.st_nlink == 0:
        return Kind.GHOST
    if link.endswith(DELETED) or _NFS_LEFTOVER.match(os.path.basename(link)):
        return Kind.NAMELESS
    return Kind.FILE


def give_names(things: Iterable[Object], carry_paths: Sequence[str], root_pid: int) -> None:
    """Gives node-local files whose name was removed another name of theirs in the same directory, to be moved under it.

    Every named semaphore needs this: sem_open creates it under a temporary name, and only its real name remains.
    Names are looked for in the root directory of the process `root_pid`. If two files had the same name, the target could
    not distinguish them: they stay nameless.
    """
    things = list(things)
    lost = [thing for thing in things if _can_be_named(thing, carry_paths)]
    owners: dict[str, set[tuple[int, int]]] = {}
    for thing in lost:
        owners.setdefault(thing.link, set()).add(thing.inode)
    inodes = {thing.inode for thing in lost}
    folders = {os.path.dirname(thing.path) for thing in lost}
    if not lost:
        return
    root = paths.open_root(root_pid)
    try:
        names = {folder: _names_in(root, folder, inodes) for folder in folders}
    finally:
        os.close(root)
    in_use = {thing.path for thing in things if thing.kind is Kind.FILE}
    for thing in lost:
        found = names[os.path.dirname(thing.path)].get(thing.inode)
        if found and len(owners[thing.link]) == 1:
            thing.other_name = min(found, key=lambda name: (name not in in_use, name))
            thing.kind = Kind.FILE


def _can_be_named(thing: Object, carry_paths: Sequence[str]) -> bool:
    return (
        thing.kind is Kind.NAMELESS
        and thing.link.endswith(DELETED)  # not a file that NFS keeps: its other names are on the server
        and thing.stat is not None
        and mode_of.S_ISREG(thing.stat.st_mode)
        and is_carried(thing.path, carry_paths)
        and is_utf8(thing.path)
    )


def _names_in(root: int, folder: str, inodes: Collection[tuple[int, int]]) -> dict[tuple[int, int], list[str]]:
    """The names that these files have in one directory."""
    found: dict[tuple[int, int], list[str]] = {}
    numbers = {number for _, number in inodes}
    try:
        handle = paths.open_folder_in(root, folder, os.O_RDONLY)
    except OSError:
        return found  # the directory was removed, or swapped for a link: the files in it are nameless
    try:
        with os.scandir(handle) as entries:
            for entry in entries:
                if entry.inode() in numbers and is_utf8(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    found.setdefault((stat.st_dev, stat.st_ino), []).append(f"{folder}/{entry.name}")
    finally:
        os.close(handle)
    return found


def is_pseudo(path: str) -> bool:
    return path.startswith(("/proc/", "/sys/")) or path in ("/proc", "/sys")


def is_carried(path: str, carry_paths: Sequence[str]) -> bool:
    """Whether a path is inside a node-local directory. The directory itself exists on every node."""
    return any(path.startswith(folder.rstrip("/") + "/") for folder in carry_paths)


def is_utf8(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
