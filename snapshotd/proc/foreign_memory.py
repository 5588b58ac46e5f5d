"""Reads and writes the memory of processes that belong to users, with a time limit.

A page of such a process may be backed by a FUSE file system whose server does not answer, or by a userfaultfd. Reading it
through /proc/PID/mem then never returns. Reading environ, cmdline or maps may not return either, because the process can keep
the lock of its mappings. A thread that waits there cannot be ended, so the reading is done in a child, which can be killed.

A child has the user and groups of the processes that it looks at, and is in a sandbox. The kernel says which: it gives the
files of a process that is not dumpable to root.

A process keeps its pid and its start time when it executes a set-user-id program, whose memory must not be reached for the
user that started it. So a request for memory names the user whose process it must be. The child compares after it has opened
the memory: an exec after that leaves it with the memory of the program before.

Invariants: only memory that its user could write with a debugger is written, and root's child writes into processes of root
alone. A request returns or raises within its limit. A child serves one request at a time, so one that hangs delays no
other request. It is then killed and replaced. A process that did not answer is not asked again for a while, because an
operation on a rank reads many times, and some children cannot even be killed before the FUSE server ends.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import socket
import subprocess
import threading
import time

from snapshotd.api.errors import Damaged, Internal, Timeout, Where
from snapshotd.proc import comm, stat, status
from snapshotd.proc import foreign_memory_child as child
from snapshotd.runtime.child_process import ChildProcess, Spares
from snapshotd.sandbox.privileges import Ids

log = logging.getLogger(__name__)

#: A page that was swapped out arrives within milliseconds, on a busy disk within seconds.
LIMIT_S = 10.0
#: A child starts in a tenth of a second; many at a time on a busy machine take longer.
START_S = 30.0
#: How long a process that did not answer is refused at once.
SILENT_S = 60.0
#: How many children wait for the next request.
_IDLE_MAX = 8
#: One that was not needed for this long is ended: each has as much memory as a small Python program, 9 MiB.
_IDLE_S = 15.0
#: More than this at once would be memory for which a single request should not ask.
_REQUEST_BYTES_MAX = 64 << 20

#: How many children wait that have not become a user yet.
_SPARE_MAX = 2


class _Lost(Exception):
    """The child ended before it answered."""


class _Child:
    """One child process. Used by one thread at a time."""

    def __init__(self, started: ChildProcess) -> None:
        self._child = started
        self._connection = started.line
        self.ids: Ids | None = None
        self.writes = False
        self.used_s = 0.0  # CLOCK_MONOTONIC

    def become(self, ids: Ids, limit_s: float, *, writes: bool) -> None:
        """Raises _Lost, TimeoutError, or Internal if it cannot."""
        data = child.become(ids)
        number, _ = self.ask(child.REQUEST.pack(child.BECOME, 0, 0, int(writes), len(data)) + data, limit_s)
        if number:
            raise Internal(f"the child that reads memory did not become user {ids.user_id}: {os.strerror(number)}")
        self.ids, self.writes = ids, writes

    def ask(self, request: bytes, limit_s: float) -> tuple[int, bytes]:
        """The errno and the bytes of the answer. Raises _Lost, or TimeoutError."""
        deadline = time.monotonic() + limit_s
        try:
            self._connection.settimeout(limit_s)
            self._connection.sendall(request)
            number, size = child.ANSWER.unpack(self._receive(child.ANSWER.size, deadline))
            return number, self._receive(size, deadline)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise _Lost from error

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._connection.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        """Does not wait: a child that waits for a FUSE server may end only with that server."""
        self._child.process.kill()
        self._child.close()

    def ended(self) -> bool:
        return self._child.process.poll() is not None

    def wait(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(limit_s)

    def last_output(self) -> str:
        return self._child.last_output()


class _Children:
    """The children of this process, and the processes that did not answer them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # the one that was used last is at the end
        self.spares = Spares(child.__name__, most=_SPARE_MAX, kind=socket.SOCK_STREAM)  # they have no user yet
        self._ending: list[_Child] = []
        self._silent: dict[tuple[int, int], float] = {}  # by pid and start time: when it may be asked again

    def ask(self, pid: int, ids: Ids, request: bytes, limit_s: float, *, writes: bool) -> tuple[int, bytes]:
        """`writes`: whether memory is written. A child of root that only reads opens nothing for writing. For another user
        one child does both, because what it can open is that user's to change anyway."""
        writes = writes or ids.user_id != 0
        output = ""
        for _ in range(3):
            helper = self._take(ids, writes=writes)
            try:
                if helper.ids is None:
                    self._become(helper, pid, ids, writes=writes)
                answer = helper.ask(request, limit_s)
            except TimeoutError as error:
                self._drop(helper)
                raise self._silence(pid, limit_s) from error
            except _Lost:
                # It may have been idle for long and ended meanwhile. Every request can be repeated.
                output = helper.last_output()
                self._drop(helper)
                continue
            except BaseException:
                self._drop(helper)
                raise
            self._give_back(helper)
            return answer
        raise Internal(
            f"the memory of process {pid} cannot be read: the child that reads it ends at once: {output or 'no output'}"
        )

    def _become(self, helper: _Child, pid: int, ids: Ids, *, writes: bool) -> None:
        try:
            helper.become(ids, START_S, writes=writes)
        except TimeoutError as error:  # the process is not to blame
            raise Timeout(
                f"the child that reads the memory of process {pid} did not start within {START_S:.0f} s",
                remedy="retry when the node is less busy",
                where=Where.UNKNOWN,
            ) from error

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            self._drop(helper)
        self.spares.close()
        for helper in self._ending:
            helper.wait(1.0)

    def _take(self, ids: Ids, *, writes: bool) -> _Child:
        with self._lock:
            for helper in reversed(self._idle):
                if (helper.ids, helper.writes) == (ids, writes):
                    self._idle.remove(helper)
                    return helper
        return _Child(self.spares.take())

    def _give_back(self, helper: _Child) -> None:
        helper.used_s = now = time.monotonic()
        surplus = []
        with self._lock:
            self._idle.append(helper)
            while len(self._idle) > _IDLE_MAX or self._idle[0].used_s < now - _IDLE_S:
                surplus.append(self._idle.pop(0))
            self._ending = [one for one in self._ending if not one.ended()]
        for one in surplus:
            self._drop(one)

    def _drop(self, helper: _Child) -> None:
        helper.kill()
        with self._lock:
            self._ending.append(helper)

    def refuse_silent(self, pid: int) -> None:
        with self._lock:
            if not self._silent:
                return
            now = time.monotonic()
            self._silent = {key: until for key, until in self._silent.items() if until > now}
            refused = (pid, _start_ticks(pid)) in self._silent
        if refused:
            raise _timeout(pid, "did not answer shortly before")

    def _silence(self, pid: int, limit_s: float) -> Timeout:
        error = _timeout(pid, f"did not answer within {limit_s:.0f} s")
        log.warning("%s", error.message)
        with self._lock:
            self._silent[pid, _start_ticks(pid)] = time.monotonic() + SILENT_S
        return error


_children = _Children()
atexit.register(_children.close)


def prepare() -> None:
    """Starts children in advance, for a move whose pause must not wait for them."""
    _children.spares.fill(_SPARE_MAX)


def read(pid: int, start_ticks: int, address: int, size: int, limit_s: float = LIMIT_S, *, user_id: int) -> bytes:
    """The bytes at an address; fewer where a mapping ends.

    Raises ProcessLookupError or FileNotFoundError if the process has ended, PermissionError if one of its user ids is not
    `user_id`, OSError if nothing is mapped at the address, Timeout if the page does not arrive.
    """
    if not 0 <= size <= _REQUEST_BYTES_MAX:
        raise Internal(f"{size} bytes of memory at once")
    header = child.REQUEST.pack(child.READ, pid, start_ticks, _address(address), size)
    return _ask(pid, header + child.USER.pack(user_id), "mem", limit_s)


def write(pid: int, start_ticks: int, address: int, data: bytes, limit_s: float = LIMIT_S, *, user_id: int) -> None:
    """Raises as `read` does; PermissionError also if its group ids differ, or if it is not dumpable and not of root."""
    header = child.REQUEST.pack(child.WRITE, pid, start_ticks, _address(address), len(data))
    _ask(pid, header + child.USER.pack(user_id) + data, "mem", limit_s, writer=user_id)


def read_mapped(pid: int, start: int, end: int, offset: int, size: int, limit_s: float = LIMIT_S) -> bytes:
    """Bytes of the file that is mapped exactly from `start` to `end`; fewer at its end.

    Raises FileNotFoundError or ProcessLookupError if the process has ended or no longer maps it, OSError if it cannot be
    read, Timeout.
    """
    if not 0 <= size <= _REQUEST_BYTES_MAX:
        raise Internal(f"{size} bytes of a mapped file at once")
    header = child.REQUEST.pack(child.READ_MAPPED, pid, 0, _address(offset), size)
    return _ask(pid, header + child.MAPPING.pack(start, end), "map_files", limit_s)


def read_file(pid: int, name: str, limit_s: float = LIMIT_S) -> bytes:
    """The content of /proc/PID/`name`, one of `foreign_memory_child.FILES`.

    Raises ProcessLookupError or FileNotFoundError if the process has ended, Timeout, or Damaged if it is too large.
    """
    return _ask(
        pid, child.REQUEST.pack(child.READ_FILE, pid, 0, child.FILES.index(name), child.FILE_BYTES_MAX), name, limit_s
    )


def _ask(pid: int, request: bytes, what: str, limit_s: float, *, writer: int | None = None) -> bytes:
    """`writer`: the only user with whose rights this may be done; None: the one to which the kernel gives the file."""
    _children.refuse_silent(pid)
    ids = _ids(pid)
    if writer is not None:
        _check_writer(pid, ids, writer)
    number, found = _children.ask(pid, ids, request, limit_s, writes=writer is not None)
    if number == 0:
        return found
    error = OSError(number, os.strerror(number), f"/proc/{pid}/{what}")  # of the subclass that belongs to the number
    if number == errno.EFBIG:
        raise Damaged(f"/proc/{pid}/{what} has more than {child.FILE_BYTES_MAX >> 20} MiB") from error
    raise error


def _ids(pid: int) -> Ids:
    """With whose ids the files of a process in /proc are opened. Raises FileNotFoundError or ProcessLookupError."""
    owner = os.stat(f"/proc/{pid}/mem")
    groups = status.read(pid).groups if owner.st_uid else ()
    return Ids(owner.st_uid, owner.st_gid, groups)


def _check_writer(pid: int, ids: Ids, user_id: int) -> None:
    """Raises PermissionError unless the memory belongs to that user: no child of root is started to write it."""
    if ids.user_id != user_id:
        raise PermissionError(errno.EPERM, f"belongs to user {ids.user_id}, not to {user_id}", f"/proc/{pid}/mem")


def _address(address: int) -> int:
    """An address that comes from a process's memory may be anything."""
    return address & 0xFFFFFFFFFFFFFFFF


def _start_ticks(pid: int) -> int:
    try:
        return stat.read(pid).start_ticks
    except ProcessLookupError:
        return 0


def _timeout(pid: int, what: str) -> Timeout:
    return Timeout(
        f"the memory of process {pid} ({comm.name_or(pid, 'gone')}) {what}",
        remedy="a page of it is backed by a userfaultfd or a FUSE file system that does not respond; end that process,"
        " or whatever serves its pages, then retry",
        where=Where.UNKNOWN,
    )
