"""Starts a child with a user's own rights (`snapshotd/files/worker.py`) and has it work on that user's files.

Invariants: every request ends with an answer, with an OSError, or with the child killed after a time limit, because a file
system that a user controls (FUSE) may never answer. The child's answers are checked before they are used. All functions
block: call them in a thread.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from snapshotd.api.errors import Internal, Timeout, Where
from snapshotd.files.worker import MAX_FDS, MESSAGE_BYTES
from snapshotd.proc.credentials import Identity
from snapshotd.runtime.child_process import Spares

_WORKER = "snapshotd.files.worker"
#: Time limit of one request: a fixed part, and a part for every GiB that is copied or compared.
LIMIT_S, LIMIT_GIB_S = 30.0, 30.0
_NOBODY = 65534


class User(NamedTuple):
    """The ids with which a rank's files are accessed."""

    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()

    @property
    def all_groups(self) -> set[int]:
        return {self.group_id, *self.groups}

    def could_not_own(self, user_id: int, group_id: int) -> str:
        """Why this user could not make a file of that owner and group; empty if they could."""
        if self.user_id == 0:
            return ""
        if user_id != self.user_id:
            return f"it belongs to user {user_id}, not to the rank's, and is not on this node"
        return "" if group_id in self.all_groups else f"it has group {group_id}, which the rank's user is not in"


ROOT = User(0, 0)


def user_of_rank(pid: int, registered_id: int) -> User:
    """The user with whose rights the files of a rank are accessed. Raises Mixed if its process has several."""
    return file_user(Identity.of(pid), registered_id)


def file_user(identity: Identity, registered_id: int) -> User:
    """The same, given the identity of the rank's process, and the user who registered the rank.

    A rank that root registered has the user of its process. One whose process has become another user's since, through a
    set-user-id program, keeps the user who registered it, without groups.
    """
    if registered_id in (0, identity.user_id):
        return User(identity.user_id, identity.group_id, identity.groups)
    return User(registered_id, _NOBODY)


#: Of this daemon. None of them has become a user yet.
spares = Spares(_WORKER, most=4)


class UserFiles:
    """One child. Use it as a context manager, from one thread at a time."""

    def __init__(self, user: User, where: Where = Where.SOURCE_FROZEN, write: Iterable[str] = ()) -> None:
        """`write`: the directories below which it may change anything, if that user may, and outside which it opens no
        file. Without one it changes nothing, and opens for reading what that user can."""
        self.user, self._where, self._write = user, where, list(write)
        self._child = spares.take()
        self._ended = False

    def __enter__(self) -> Self:
        user = self.user
        try:
            wanted = [user.user_id] + [user.group_id] * 3
            answer, _ = self.ask("become", ids=[*user], write=self._write)
            if answer.get("ids") != wanted:
                raise Internal(f"the file worker did not become user {user.user_id}: {answer}", where=self._where)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise Internal(
                    f"the file worker did not become user {user.user_id}: {error}", where=self._where
                ) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child. Idempotent."""
        if not self._ended:
            self._ended = True
            self._child.end()

    def ask(
        self, do: str, fds: Sequence[int] = (), size_bytes: int = 0, **order: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer and its descriptors, which are the caller's. Raises OSError as the child met it, or Timeout."""
        limit_s = LIMIT_S + LIMIT_GIB_S * size_bytes / 2**30
        self._child.line.settimeout(limit_s)
        try:
            socket.send_fds(self._child.line, [json.dumps({"do": do, "limit_s": limit_s, **order}).encode()], fds)
            blob, given, flags, _ = socket.recv_fds(self._child.line, MESSAGE_BYTES, MAX_FDS)
        except TimeoutError as error:
            self._child.kill()
            raise Timeout(
                f"the file system did not answer within {limit_s:.0f} s ({do} {order.get('name', order.get('path', ''))})",
                remedy="check the file systems below carry_paths on that node; a retry is safe",
                where=self._where,
            ) from error
        except (BrokenPipeError, ConnectionResetError):
            blob, given, flags = b"", [], 0
        try:
            if not blob:
                raise Internal(f"the file worker ended: {self._child.last_output() or 'no output'}", where=self._where)
            answer = json.loads(blob) if not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else None
            if not isinstance(answer, dict):
                raise Internal("the file worker sent a malformed answer", where=self._where)
            if "errno" in answer:
                raise OSError(int(answer["errno"]), str(answer["error"]))
        except BaseException:
            for fd in given:
                os.close(fd)
            raise
        return answer, given

    def ask_fd(self, do: str, fds: Sequence[int] = (), **order: Any) -> tuple[dict[str, Any], int]:
        """The same for a request whose answer has exactly one descriptor."""
        answer, given = self.ask(do, fds, **order)
        if len(given) != 1:
            for fd in given:
                os.close(fd)
            raise Internal("the file worker sent a malformed answer", where=self._where)
        return answer, given[0]

    def reopen(self, handle: int) -> int:
        """A descriptor for reading of what an O_PATH descriptor refers to, if the user may read it."""
        return self.ask_fd("reopen", [handle])[1]
