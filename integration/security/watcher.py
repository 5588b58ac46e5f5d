"""Watches, with fanotify, what processes of a lab do to files while an attack runs.

Two rules. No process opens a secret: a file that only root may read, and to which the attack's links lead. And no process
of root in the lab writes to a file outside the daemon's own folders. An event holds a descriptor of the file itself, so the
path is the true one, whatever links were followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LIBC = ctypes.CDLL(None, use_errno=True)
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_CLOEXEC, _NONBLOCK, _UNLIMITED = 0x1, 0x2, 0x10
_ADD, _FILESYSTEM = 0x1, 0x100
_MODIFY, _OPEN, _CHILDREN = 0x2, 0x20, 0x08000000
_AT_FDCWD = -100


@dataclass(frozen=True)
class Touched:
    """A file that a process opened (a secret) or wrote to."""

    path: str
    pid: int
    user_id: int | None  # None: the process had ended before it could be looked at
    command: str
    owner: int  # of the file, afterwards

    def __str__(self) -> str:
        process = f"{self.command or 'a process that has ended'} (pid {self.pid}, user {self.user_id})"
        return f"{self.path}, a file of user {self.owner}, by {process}"


class Watcher:
    """`secrets` is a folder. `roots` has the file systems to watch: the name of the node, its mount point there, and a
    path to that from here.

    `cgroup` is part of the names of the lab's cgroups.
    """

    def __init__(self, secrets: Path, roots: Sequence[tuple[str, str, Path]], cgroup: str) -> None:
        self.opened: list[Touched] = []
        self.written: list[Touched] = []
        self.overflowed = False
        self._cgroup = cgroup
        self._secrets = self._group()
        self._mark(self._secrets, _ADD, _OPEN | _CHILDREN, secrets)
        self._files = self._group()
        self._names = {os.stat(root).st_dev: (name, mount) for name, mount, root in roots}
        for _, _, root in roots:
            self._mark(self._files, _ADD | _FILESYSTEM, _MODIFY, root)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="watcher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for descriptor in (self._stop, self._secrets, self._files):
            os.close(descriptor)

    @staticmethod
    def _group() -> int:
        descriptor = _LIBC.fanotify_init(_CLOEXEC | _NONBLOCK | _UNLIMITED, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        return int(descriptor)

    @staticmethod
    def _mark(group: int, flags: int, events: int, path: Path) -> None:
        if _LIBC.fanotify_mark(group, flags, ctypes.c_uint64(events), _AT_FDCWD, bytes(path)) < 0:
            raise OSError(ctypes.get_errno(), f"fanotify_mark {path}")

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._secrets, self._files, self._stop], [], [])
            for group, found in ((self._secrets, self.opened), (self._files, self.written)):
                if group in ready:
                    self._read(group, found, everyone=group == self._secrets)
            if self._stop in ready:
                return

    def _read(self, group: int, found: list[Touched], *, everyone: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            blob = os.read(group, 1 << 16)
            while blob:
                length, _, _, _, _, descriptor, pid = _EVENT.unpack_from(blob)
                blob = blob[length:]
                if descriptor < 0:
                    self.overflowed = True
                    continue
                try:
                    self._take(descriptor, pid, found, everyone=everyone)
                finally:
                    os.close(descriptor)

    def _take(self, descriptor: int, pid: int, found: list[Touched], *, everyone: bool) -> None:
        about = os.fstat(descriptor)
        place, mount = self._names.get(about.st_dev, ("", ""))
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        # The mounts of criu's own namespace have ended with it: then the path begins at the root of the file system.
        path = place + (path if path.startswith(f"{mount}/") else mount + path)
        # On the file systems of the nodes, a process that has ended meanwhile was one of the lab's.
        user_id, command, ours = None, "", bool(place)
        with contextlib.suppress(OSError):
            ours = self._cgroup in Path(f"/proc/{pid}/cgroup").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
            user_id = int(status.partition("\nUid:\t")[2].split()[1])
            command = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()[:200].replace(b"\0", b" "))
        if pid != os.getpid() and (everyone or (ours and user_id in (0, None))):
            found.append(Touched(path, pid, user_id, command, about.st_uid))
