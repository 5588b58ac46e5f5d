"""Starts a child with a user's own rights (`snapshotd/files/worker.py`) and has it work on that user's files.

Invariants: every request ends with an answer, with an OSError, or with the child killed after a time limit, because a file
system that a user controls (FUSE) may never answer. The child's answers are checked before they are used. All functions
block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from snapshotd.api.errors import Internal, Timeout, Where
from snapshotd.files.worker import MAX_FDS, MESSAGE_BYTES
from snapshotd.proc.credentials import Identity

_PACKAGES = Path(__file__).resolve().parents[2]
_OUTPUT_BYTES = 2000
#: Time limit of one request: a fixed part, and a part for every GiB that is copied or compared.
LIMIT_S, LIMIT_GIB_S = 30.0, 30.0
#: A killed process is normally gone in a millisecond. One that hangs in the kernel is reaped later.
_REAP_S = 5.0
_NOBODY = 65534
_MOST_SPARES = 4


class User(NamedTuple):
    """The ids with which a rank's files are accessed."""

    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()

    @property
    def all_groups(self) -> set[int]:
        return {self.group_id, *self.groups}


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


class _Started(NamedTuple):
    """A child that has not become a user yet."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    output: int


class Spares:
    """Children that are started before a move's pause, because starting one takes a tenth of a second."""

    def __init__(self) -> None:
        self._started: deque[_Started] = deque()

    def add(self) -> None:
        if len(self._started) < _MOST_SPARES:
            self._started.append(_start())

    def take(self) -> _Started:
        """A spare child, or a new one. Raises Internal if none can be started."""
        with contextlib.suppress(IndexError):
            while True:
                found = self._started.popleft()
                if found.process.poll() is None:
                    return found
                _drop(found)
        return _start()

    def close(self) -> None:
        """Ends the children that were not needed."""
        with contextlib.suppress(IndexError):
            while True:
                _drop(self._started.popleft())


#: Of this daemon.
spares = Spares()


def _start() -> _Started:
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output = os.memfd_create("child output", os.MFD_CLOEXEC)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-m", "snapshotd.files.worker"],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env=_environment(),
            )
    except BaseException as error:
        line.close()
        os.close(output)
        if isinstance(error, OSError):
            raise Internal(f"the file worker cannot be started: {error.strerror}") from error
        raise
    return _Started(process, line, output)


def _drop(started: _Started) -> None:
    """Ends a child; kills it if it does not end by itself."""
    started.line.close()
    try:
        started.process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        _kill(started.process)
    os.close(started.output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)


class UserFiles:
    """One child. Use it as a context manager, from one thread at a time."""

    def __init__(self, user: User, where: Where = Where.SOURCE_FROZEN) -> None:
        self.user, self._where = user, where
        self._started = spares.take()
        self._process, self._line, self._output = self._started
        self._ended = False

    def __enter__(self) -> Self:
        user = self.user
        try:
            wanted = [user.user_id] * 3 + [user.group_id] * 3
            answer, _ = self.ask("become", user_id=user.user_id, group_id=user.group_id, groups=list(user.groups))
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
            _drop(self._started)

    def ask(
        self, do: str, fds: Sequence[int] = (), size_bytes: int = 0, **order: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer and its descriptors, which are the caller's. Raises OSError as the child met it, or Timeout."""
        limit_s = LIMIT_S + LIMIT_GIB_S * size_bytes / 2**30
        self._line.settimeout(limit_s)
        try:
            socket.send_fds(self._line, [json.dumps({"do": do, **order}).encode()], fds)
            blob, given, flags, _ = socket.recv_fds(self._line, MESSAGE_BYTES, MAX_FDS)
        except TimeoutError as error:
            _kill(self._process)
            raise Timeout(
                f"the file system did not answer within {limit_s:.0f} s ({do} {order.get('name', order.get('path', ''))})",
                remedy="check the file systems below carry_paths on that node; a retry is safe",
                where=self._where,
            ) from error
        except (BrokenPipeError, ConnectionResetError):
            blob, given, flags = b"", [], 0
        try:
            if not blob:
                raise Internal(f"the file worker ended: {self._last_output() or 'no output'}", where=self._where)
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

    def _last_output(self) -> str:
        size = os.fstat(self._output).st_size
        return os.pread(self._output, _OUTPUT_BYTES, max(0, size - _OUTPUT_BYTES)).decode(errors="replace").strip()


def _environment() -> dict[str, str]:
    """Only what Python itself may need to start."""
    libraries = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
    return {"PYTHONPATH": str(_PACKAGES), "PATH": "/usr/bin:/bin", **libraries}
