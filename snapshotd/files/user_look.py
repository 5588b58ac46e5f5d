"""What the user of a rank sees of paths on this node, and may open there.

A child with that user's rights looks (snapshotd/files/worker.py), because criu restores with the same rights, and because a
file system that a user controls (FUSE), or a dead server of one (NFS), may never answer: the child is then killed. Invariant:
no path that the facts of a rank name is accessed by the daemon itself. All functions block: call them in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

from snapshotd.api.errors import Where
from snapshotd.files.as_user import User, UserFiles

#: Of one request, in characters: requests and answers must fit into MESSAGE_BYTES.
_BATCH_CHARS = 40_000
_BATCH_PATHS = 300


class Seen(NamedTuple):
    """A file, as stat shows it, and what the user may do with it."""

    mode: int
    user_id: int
    group_id: int
    size: int
    mtime_ns: int
    device: int
    inode: int
    may_read: bool = False
    may_write: bool = False
    may_execute: bool = False


class UserLook:
    """One child, started with the first question. Use it as a context manager, from one thread at a time."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._child: UserFiles | None = None
        self._seen: dict[str, Seen | OSError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.close()

    @property
    def _files(self) -> UserFiles:
        if self._child is None:
            self._child = UserFiles(self._user, Where.SOURCE_RUNNING)
            if os.geteuid() == 0:  # another user has only its own rights, in the child as well
                self._child.__enter__()
        return self._child

    def prefetch(self, paths: Iterable[str]) -> None:
        """Looks at many paths at once."""
        batch: list[str] = []
        for path in paths:
            batch.append(path)
            if len(batch) >= _BATCH_PATHS or sum(map(len, batch)) > _BATCH_CHARS:
                self._look(batch)
                batch = []
        if batch:
            self._look(batch)

    def stat(self, path: str) -> Seen:
        """Raises OSError as the user meets it, Timeout if the file system does not answer."""
        if path not in self._seen:
            self._look([path])
        found = self._seen[path]
        if isinstance(found, OSError):
            raise found
        return found

    def stat_without_links(self, path: str) -> Seen | None:
        """The same without following a user's link, and without the rights; None if it does not exist."""
        answer, _ = self._files.ask("look_carried", path=path)
        return Seen(*answer["found"]) if answer["found"] is not None else None

    def is_folder(self, path: str) -> bool:
        try:
            return self.stat(path).mode & 0o170000 == 0o040000
        except OSError:
            return False

    def unmakeable(self, path: str) -> str:
        """Why a directory neither exists nor can be created; empty if it does or can."""
        return str(self._files.ask("look_makeable", path=path)[0]["problem"])

    def read(self, path: str, seen: Seen, offsets: list[int], count: int) -> bytes:
        """So many bytes at each offset, one after the other. Raises OSError; ESTALE if the file was replaced since."""
        _, handle = self._files.ask_fd(
            "look_read", path=path, file=[seen.device, seen.inode], offsets=offsets, bytes=count
        )
        try:
            return os.pread(handle, len(offsets) * count, 0)
        finally:
            os.close(handle)

    def _look(self, paths: list[str]) -> None:
        answer, _ = self._files.ask("look", paths=paths)
        for path, found in zip(paths, answer["found"], strict=True):
            self._seen[path] = Seen(*found) if isinstance(found, list) else OSError(found, os.strerror(found), path)
