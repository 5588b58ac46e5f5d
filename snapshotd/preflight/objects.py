"""The distinct things behind a tree's descriptors and mappings: each file once, however many processes have it.

A torch process maps one library six times and its forked workers map it again; everything that costs a system call is
done once per object. What an object *is* is decided here and nowhere else.
"""

from __future__ import annotations

import os
import re
import stat as mode_of
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from snapshotd.preflight.procfs import DELETED, Mapping, Process

_GPU = re.compile(r"/dev/(nvidia|dri/|kfd|nvmap)")
_NFS_LEFTOVER = re.compile(r"^\.nfs[0-9a-f]{8,}")


class Kind(Enum):
    """What an object is, as far as moving it is concerned."""

    FILE = auto()  # a regular file with a name
    GHOST = auto()  # a regular file whose last name was removed: lives in the image
    NAMELESS = auto()  # its name was removed while it has other names
    MEMORY = auto()  # memfd or anonymous shared memory: lives in the image
    SYSV = auto()
    HUGE = auto()
    AIO = auto()
    PSEUDO = auto()  # /proc and /sys: made by the target's kernel
    DIRECTORY = auto()
    FIFO = auto()
    GPU = auto()  # a device of a GPU, by its name
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
    handle: str = ""  # a path under /proc that reaches it whatever happened to its name
    holders: dict[Process, int] = field(default_factory=dict)  # process -> one of its descriptors, -1: mapped only

    @property
    def path(self) -> str:
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


def gather(processes: Iterable[Process]) -> list[Object]:
    """All distinct objects of these processes, in the order they were met."""
    found: dict[object, Object] = {}
    mapped: dict[tuple[str, int, str], Object] = {}
    for process in processes:
        for descriptor in process.descriptors:
            stat = descriptor.stat
            key: object = (stat.st_dev, stat.st_ino, descriptor.link) if stat else descriptor.link
            if _is_countless(descriptor.link):  # all of one name, yet each an object of its own
                key = (process.pid, descriptor.number)
            thing = found.get(key)
            if thing is None:
                handle = f"/proc/{process.pid}/fd/{descriptor.number}"
                thing = found[key] = Object(kind_of(descriptor.link, stat), descriptor.link, stat, handle=handle)
            thing.writable |= descriptor.writable
            thing.holders.setdefault(process, descriptor.number)
        for mapping in process.mappings:
            thing = mapped.get((mapping.device, mapping.inode, mapping.path))
            if thing is None:
                thing = _mapped_object(process, mapping, found)
                if thing is None:  # unmapped while it was looked at
                    continue
                mapped[mapping.device, mapping.inode, mapping.path] = thing
            thing.mapped = True
            thing.executable |= mapping.executable
            thing.shared |= mapping.shared and mapping.writable
            thing.writable |= mapping.shared and mapping.writable
            thing.holders.setdefault(process, -1)
    return list(found.values())


def _mapped_object(process: Process, mapping: Mapping, found: dict[object, Object]) -> Object | None:
    handle = f"/proc/{process.pid}/map_files/{mapping.span}"
    stat = None
    if mapping.path.startswith("/") and not mapping.path.startswith("/SYSV"):
        try:
            stat = os.stat(handle)
        except FileNotFoundError:
            return None
    key = (stat.st_dev, stat.st_ino, mapping.path) if stat else mapping.path
    return found.setdefault(key, Object(kind_of(mapping.path, stat), mapping.path, stat, handle=handle))


def _is_countless(link: str) -> bool:
    return link.startswith("anon_inode:")


def kind_of(link: str, stat: os.stat_result | None) -> Kind:
    """What is behind a link of /proc/PID/fd or the path of a mapping."""
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


def is_pseudo(path: str) -> bool:
    return path.startswith(("/proc/", "/sys/")) or path in ("/proc", "/sys")


def is_carried(path: str, carry_paths: Sequence[str]) -> bool:
    """Whether a path lies inside a node-local directory; the directory itself is there on every node."""
    return any(path.startswith(folder.rstrip("/") + "/") for folder in carry_paths)
