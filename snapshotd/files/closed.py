"""Finds and reads files that a rank made and has closed. The part of `snapshotd/files/worker.py` for many files at once: a
compiler's cache has thousands, and one request for each would take longer than their content.

Requests and results are JSON in memory files beside the message, because they may have many megabytes. A path is given as the
number of its carry path and the path below it, and is resolved without links.

Invariants: what does not belong to the worker's user is not read. Other file systems that are mounted below a carry path are
not entered: they may be shared. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from snapshotd.files import paths

#: More files than these are not looked at.
MAX_ENTRIES = 100_000
MAX_SEEN = 1_000_000
MAX_DEPTH = 100
#: … and no more than this for all their names, as the answer has them: a path may have many kilobytes, if it was made from
#: directory to directory, and lists of paths are kept in memory and sent.
MAX_NAMES_BYTES = 32 << 20
#: What a file is called until it is complete.
SIDE = ".carried-"
PERMISSIONS = 0o777
BELOW = paths.RESOLVE_BENEATH | paths.NO_LINKS
COPY_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
#: A descriptor with which every operation fails. Not -1: a relative path would then begin at the working directory.
_MISSING = 1 << 30
#: Of other programs: private directories of services, links that criu makes during a dump, unfinished files of a move.
_NOT_TAKEN = ("systemd-private-", "snap-private-tmp", "link_remap.", SIDE)


class Row(NamedTuple):
    """A file, directory or link."""

    root: int  # number of its carry path
    path: str  # below it
    kind: str  # "f", "d" or "l"
    mode: int  # permissions
    group: int
    atime_ns: int
    mtime_ns: int
    link: str  # where a link leads to
    seen: list[int]  # see `identity`
    changed: bool  # since the time that was asked for
    left: list[int] | None = None  # target: how a file looked that an earlier move left under this name
    pack: int = -1  # number of the pack that has its content
    offset: int = 0  # … and where

    @property
    def size(self) -> int:
        return self.seen[2] if self.kind == "f" else 0


def _names_bytes(row: Row) -> int:
    """How much of an answer the names of a row take."""
    return len(encode_basestring_ascii(row.path)) + len(encode_basestring_ascii(row.link))


def identity(found: os.stat_result) -> list[int]:
    """What distinguishes a file from any other, and from itself after a change. The last number no program can set."""
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def read(handle: int) -> Any:
    """A request or a result."""
    return json.loads(os.pread(handle, os.fstat(handle).st_size, 0))


def write(handle: int, value: Any) -> None:
    content = memoryview(json.dumps(value).encode())
    while content:
        content = content[os.write(handle, content) :]


@contextlib.contextmanager
def opened(roots: list[str]) -> Iterator[list[int]]:
    """O_PATH descriptors of the carry paths, which are an administrator's choice; an invalid one for one that is missing."""
    handles: list[int] = []
    try:
        for root in roots:
            try:
                handles.append(paths.openat2(None, root, os.O_PATH | os.O_DIRECTORY, paths.NO_LINKS))
            except (FileNotFoundError, NotADirectoryError):
                handles.append(_MISSING)
        yield handles
    finally:
        for handle in handles:
            if handle != _MISSING:
                os.close(handle)


class _Scan:
    """One look below the carry paths."""

    def __init__(self, user_id: int, since_ns: int, excluded: list[tuple[int, int]]) -> None:
        self.user_id, self.since_ns, self.excluded = user_id, since_ns, {tuple(one) for one in excluded}
        self.mounts: set[str] = set()  # paths below the present carry path that are not even looked at
        self.rows: list[Row] = []
        self.top: list[Row] = []  # of the top directory that is being looked at
        self.seen = 0
        self.names_bytes, self.top_names_bytes = 0, 0  # of `rows` and of `top`
        self.others: dict[int, int] = {}  # user -> files of that user beside those of this one
        self.older_left = 0  # files that are older than `since_ns` and were left out
        self.complete = True

    def container(self, root: int, handle: int, below: str, in_use: set[str], depth: int = 0) -> None:
        """A carry path, or a directory of root in it: what it contains may be of several jobs."""
        device = os.fstat(handle).st_dev
        for name, found in self._entries(handle, below):
            path = f"{below}{name}"
            if found.st_dev != device or name.startswith(_NOT_TAKEN):
                continue
            if found.st_uid != self.user_id:
                self.others[found.st_uid] = self.others.get(found.st_uid, 0) + 1
                if stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and depth < MAX_DEPTH:
                    with self._folder(handle, name, found) as folder:
                        if folder is not None:
                            self.container(root, folder, f"{path}/", in_use, depth + 1)
                continue
            self._take(root, handle, name, path, found, device, depth)
            if path in in_use or any(row.changed for row in self.top):
                self.rows += self.top
                self.names_bytes += self.top_names_bytes
            self.top, self.top_names_bytes = [], 0

    def _take(
        self, root: int, handle: int, name: str, path: str, found: os.stat_result, device: int, depth: int
    ) -> None:
        """One thing, with all that is in it."""
        if found.st_uid != self.user_id or found.st_dev != device or name.startswith(_NOT_TAKEN):
            return
        kind, link = "", ""
        if stat.S_ISREG(found.st_mode):
            kind = "f"
        elif stat.S_ISDIR(found.st_mode):
            kind = "d"
        elif stat.S_ISLNK(found.st_mode):
            try:
                kind, link = "l", os.readlink(name, dir_fd=handle)
            except OSError:
                return
        if not kind or (found.st_dev, found.st_ino) in self.excluded:
            return
        changed = found.st_ctime_ns >= self.since_ns
        mode, times = found.st_mode & PERMISSIONS, (found.st_atime_ns, found.st_mtime_ns)
        row = Row(root, path, kind, mode, found.st_gid, *times, link, identity(found), changed)
        if not self._has_room(row):
            return
        self.top.append(row)
        if kind == "d":
            if depth >= MAX_DEPTH:
                self.complete = False
                return
            with self._folder(handle, name, found) as folder:
                if folder is not None:
                    for inner, its in self._entries(folder, f"{path}/"):
                        self._take(root, folder, inner, f"{path}/{inner}", its, device, depth + 1)

    def _has_room(self, row: Row) -> bool:
        """Older files are left out if there are too many files, or their names are too long."""
        names_bytes = _names_bytes(row)
        if self._is_full(names_bytes) and not self.older_left:
            for rows in (self.rows, self.top):
                kept = [row for row in rows if row.changed or row.kind == "d"]
                self.older_left += len(rows) - len(kept)
                rows[:] = kept
            self.names_bytes = sum(map(_names_bytes, self.rows))
            self.top_names_bytes = sum(map(_names_bytes, self.top))
        if self.older_left and not (row.changed or row.kind == "d"):
            self.older_left += 1
            return False
        if self._is_full(names_bytes):
            self.complete = False
            return False
        self.top_names_bytes += names_bytes
        return True

    def _is_full(self, names_bytes: int) -> bool:
        names_bytes += self.names_bytes + self.top_names_bytes
        return len(self.rows) + len(self.top) >= MAX_ENTRIES or names_bytes > MAX_NAMES_BYTES

    def _entries(self, handle: int, below: str) -> Iterator[tuple[str, os.stat_result]]:
        """What a directory contains, until there is too much. A mount point is not asked for anything: its server may be
        silent (FUSE)."""
        with contextlib.suppress(OSError), os.scandir(handle) as entries:
            for entry in entries:
                self.seen += 1
                if self.seen > MAX_SEEN:
                    self.complete = False
                if not self.complete:
                    return
                if f"{below}{entry.name}" in self.mounts:
                    continue
                with contextlib.suppress(OSError):  # removed meanwhile
                    yield entry.name, entry.stat(follow_symlinks=False)

    @contextlib.contextmanager
    def _folder(self, handle: int, name: str, seen: os.stat_result) -> Iterator[int | None]:
        """None if it is not the directory that was seen, or may not be read."""
        try:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        except OSError:
            yield None
            return
        try:
            yield folder if os.path.samestat(os.fstat(folder), seen) else None
        finally:
            os.close(folder)


def scan(wanted: dict[str, Any], user_id: int) -> dict[str, Any]:
    """Everything of the user below the carry paths that was changed since a time, and everything else of the user in the same
    top directories: a cache from an earlier run is used with what was added to it.

    `in_use` are paths that the rank has open: the top directory around one is taken as well."""
    excluded = []
    for path in wanted["exclude"]:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            excluded.append((found.st_dev, found.st_ino))
    excluded += [(device, inode) for device, inode in wanted["held_elsewhere"]]
    look = _Scan(user_id, wanted["since_ns"], excluded)
    for number, root in enumerate(wanted["roots"]):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            handle = paths.openat2(None, root, os.O_RDONLY | os.O_DIRECTORY, paths.NO_LINKS)
            try:
                look.mounts = set(wanted["mounts"][number])
                look.container(number, handle, "", _with_parents(wanted["in_use"][number]))
            finally:
                os.close(handle)
    crowd = max(look.others.items(), key=lambda one: one[1], default=None)
    is_crowded = look.seen > MAX_SEEN and crowd is not None and crowd[1] > MAX_SEEN // 2
    return {
        "rows": look.rows,
        "older_left": look.older_left,
        "complete": look.complete,
        "crowd": crowd if is_crowded else None,
    }


def _with_parents(in_use: list[str]) -> set[str]:
    """These paths and all directories above them: looking each up takes no longer if there are many."""
    found: set[str] = set()
    for path in in_use:
        while path and path not in found:
            found.add(path)
            path = os.path.dirname(path)
    return found


def pack(wanted: dict[str, Any], pipe: int) -> dict[str, Any]:
    """Writes the content of files into a pipe, one after the other, each exactly as long as it was seen. `bad` are the
    numbers of those that could not be read or were changed: what was written for them is worthless. `digests` are of files
    below those carry paths for which they are asked for."""
    bad: list[int] = []
    digests: list[tuple[int, str]] = []
    with opened(wanted["roots"]) as roots:
        for number, (root, below, seen) in enumerate(wanted["files"]):
            missing: int = seen[2]
            try:
                file = _open_seen(roots[root], below, seen)
                try:
                    if wanted["with_digest"][root]:
                        digest, missing = _send_digested(file, pipe, missing)
                        digests.append((number, digest))
                    else:
                        missing = _send(file, pipe, missing)
                    if missing or identity(os.fstat(file)) != seen:
                        raise OSError(errno.ESTALE, "it was changed")
                finally:
                    os.close(file)
            except BrokenPipeError:
                raise
            except OSError:
                bad.append(number)
                _pad(pipe, missing)
    return {"bad": bad, "digests": digests}


def same_content(wanted: dict[str, Any]) -> list[int]:
    """The numbers of the files whose content has the digest that it had."""
    same = []
    with opened(wanted["roots"]) as roots:
        for number, (root, below, seen, digest) in enumerate(wanted["files"]):
            with contextlib.suppress(OSError):
                file = _open_seen(roots[root], below, seen)
                try:
                    if _send_digested(file, None, seen[2]) == (digest, 0):
                        same.append(number)
                finally:
                    os.close(file)
    return same


def _open_seen(root: int, below: str, seen: list[int]) -> int:
    """The file that was seen, for reading. Raises OSError if it is another one, or was changed."""
    handle = paths.openat2(root, below, os.O_PATH | os.O_NOFOLLOW, BELOW)
    try:
        if identity(os.fstat(handle)) != seen:
            raise OSError(errno.ESTALE, "it was changed")
        return paths.reopen(handle)
    finally:
        os.close(handle)


def _send_digested(file: int, pipe: int | None, size: int) -> tuple[str, int]:
    """Returns the digest of what was read and written, and how many bytes are missing."""
    digest = hashlib.sha256()
    missing = size
    while missing and (block := os.pread(file, min(BLOCK_BYTES, missing), size - missing)):
        digest.update(block)
        missing -= len(block)
        rest = memoryview(block)
        while pipe is not None and rest:
            rest = rest[os.write(pipe, rest) :]
    return digest.hexdigest(), missing


def _send(file: int, pipe: int, size: int) -> int:
    """Returns how many bytes are missing."""
    offset = 0
    while offset < size:
        count = os.sendfile(pipe, file, offset, min(COPY_BYTES, size - offset))
        if not count:
            break
        offset += count
    return size - offset


def _pad(pipe: int, size: int) -> None:
    zeros = bytes(BLOCK_BYTES)
    while size:
        size -= os.write(pipe, zeros[: min(size, len(zeros))])


def order_scan(fds: list[int], user_id: int) -> dict[str, Any]:
    wanted, result = fds
    write(result, scan(read(wanted), user_id))
    return {}


def order_same(fds: list[int]) -> dict[str, Any]:
    wanted, result = fds
    write(result, same_content(read(wanted)))
    return {}


def order_pack(fds: list[int]) -> dict[str, Any]:
    wanted, result, pipe = fds
    write(result, pack(read(wanted), pipe))
    return {}
