"""Reads and writes the memory of processes that belong to users, with a time limit.

A page of such a process may be backed by a FUSE file system whose server does not answer, or by a userfaultfd. Reading it
through /proc/PID/mem then never returns. Reading environ, cmdline or maps may not return either, because the process can keep
the lock of its mappings. A thread that waits there cannot be ended, so the reading is done in a child, which can be killed.

Invariants: a request returns or raises within its limit. A child serves one request at a time, so one that hangs delays no
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
import sys
import threading
import time
from pathlib import Path

from snapshotd.api.errors import Damaged, Internal, Timeout, Where
from snapshotd.proc import comm, stat
from snapshotd.proc import foreign_memory_child as child

log = logging.getLogger(__name__)

#: A page that was swapped out arrives within milliseconds, on a busy disk within seconds.
LIMIT_S = 10.0
#: How long a process that did not answer is refused at once.
SILENT_S = 60.0
#: How many children wait for the next request.
_IDLE_MAX = 8
#: More than this at once would be memory for which a single request should not ask.
_REQUEST_BYTES_MAX = 64 << 20

_PROGRAM = Path(child.__file__)


class _Lost(Exception):
    """The child ended before it answered."""


class _Child:
    """One child process. Used by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,
            )
        self._connection = ours

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
        self._connection.close()
        self._process.kill()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)


class _Children:
    """The children of this process, and the processes that did not answer them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._ending: list[_Child] = []
        self._silent: dict[tuple[int, int], float] = {}  # by pid and start time: when it may be asked again

    def ask(self, pid: int, request: bytes, limit_s: float) -> tuple[int, bytes]:
        self._refuse_silent(pid)
        for _ in range(3):
            helper = self._take()
            try:
                answer = helper.ask(request, limit_s)
            except TimeoutError as error:
                self._drop(helper)
                raise self._silence(pid, limit_s) from error
            except _Lost:
                # It may have been idle for long and ended meanwhile. Every request can be repeated.
                self._drop(helper)
                continue
            except BaseException:
                self._drop(helper)
                raise
            self._give_back(helper)
            return answer
        raise Internal(f"the memory of process {pid} cannot be read: the child that reads it ends at once")

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            self._drop(helper)
        for helper in self._ending:
            helper.wait(1.0)

    def _take(self) -> _Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._ending = [helper for helper in self._ending if not helper.ended()]
        return _Child()

    def _give_back(self, helper: _Child) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(helper)
                return
        self._drop(helper)

    def _drop(self, helper: _Child) -> None:
        helper.kill()
        with self._lock:
            self._ending.append(helper)

    def _refuse_silent(self, pid: int) -> None:
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


def read(pid: int, start_ticks: int, address: int, size: int, limit_s: float = LIMIT_S) -> bytes:
    """The bytes at an address; fewer where a mapping ends.

    Raises ProcessLookupError or FileNotFoundError if the process has ended, OSError if nothing is mapped at the address,
    Timeout if the page does not arrive.
    """
    if not 0 <= size <= _REQUEST_BYTES_MAX:
        raise Internal(f"{size} bytes of memory at once")
    return _ask(pid, child.REQUEST.pack(child.READ, pid, start_ticks, _address(address), size), "memory", limit_s)


def write(pid: int, start_ticks: int, address: int, data: bytes, limit_s: float = LIMIT_S) -> None:
    """Raises as `read` does."""
    header = child.REQUEST.pack(child.WRITE, pid, start_ticks, _address(address), len(data))
    _ask(pid, header + data, "memory", limit_s)


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
    return _ask(pid, child.REQUEST.pack(child.READ_FILE, pid, 0, child.FILES.index(name), 0), name, limit_s)


def _ask(pid: int, request: bytes, what: str, limit_s: float) -> bytes:
    number, found = _children.ask(pid, request, limit_s)
    if number == 0:
        return found
    error = OSError(number, os.strerror(number), f"/proc/{pid}/{what}")  # of the subclass that belongs to the number
    if number == errno.EFBIG:
        raise Damaged(f"/proc/{pid}/{what} has more than {child.FILE_BYTES_MAX >> 20} MiB") from error
    raise error


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
