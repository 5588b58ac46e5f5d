"""Follows the memory of one process of a rank: starts the child that does it, and speaks with it.

The shim inside the process makes the userfaultfd. This daemon takes it and hands it to the child (child.py). Then neither
the process nor the daemon has one. The job runs on meanwhile. Whatever fails here costs time in the pause and nothing else.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from snapshotd.api.errors import Internal, RankGone, SnapshotError, Where
from snapshotd.inprocess import shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.precopy import child
from snapshotd.precopy.layout import Layout, Range
from snapshotd.precopy.messages import (
    ANSWER,
    BEGIN,
    CHUNK_BYTES,
    FINISH,
    MESSAGE_BYTES,
    NEXT,
    PAGE_BYTES,
    RANGE,
    REQUEST,
    SCAN,
    SLOTS,
)
from snapshotd.proc.tree import Process
from snapshotd.runtime import child_process

#: A page that was swapped out arrives within milliseconds, on a busy disk within seconds.
LIMIT_S = 30.0
_OPEN_S = 5.0
_PIDFD_GETFD = 438  # the same number on every architecture
_USERFAULTFD = "anon_inode:[userfaultfd]"

_libc = ctypes.CDLL(None, use_errno=True)


class Unsupported(Exception):
    """The kernel, a filter of system calls or the library in the process cannot do it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages that were written, as one chunk of the file on the target."""

    offset: int
    length: int
    bitmap: bytes  # one bit for each page of `length`, lowest first: those in the payload
    payload: bytes


class Tracker:
    """One process that is followed. `close` ends it, at any time and from any thread. After an error use nothing else."""

    def __init__(self, process: Process) -> None:
        """Nothing is tracked yet."""
        self.process = process
        self._child = child_process.start(child.__name__)
        self._child.line.settimeout(LIMIT_S)
        self._slot = 0
        self._buffer: mmap.mmap | None = None
        self.layout = Layout([])

    @property
    def child_pid(self) -> int:
        return self._child.pid

    def begin(self, mailbox: shimctl.Mailbox, *, forked: bool = False) -> None:
        """Begins to track. Raises Unsupported. `forked`: its parent is one of the rank; if they share memory, nothing is
        tracked, because that memory is sent with the parent's."""
        with ExitStack() as opened:

            def keep(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            def open_file(name: str) -> int:
                return keep(os.open(f"/proc/{self.process.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC))

            try:
                files = [open_file(name) for name in ("pagemap", "mem", "smaps")]
                if not self.process.alive():
                    raise RankGone(f"process {self.process.pid} has ended", where=Where.ENDED)
                # From here on these files are that process's memory. If it executes another program before the next line,
                # the userfaultfd belongs to other memory, in which they find nothing.
                with mailbox.turn():
                    userfaultfd = keep(_take(mailbox))
                buffer = keep(os.memfd_create("precopy", os.MFD_CLOEXEC))
                os.truncate(buffer, SLOTS * CHUNK_BYTES)
                self._buffer = mmap.mmap(buffer, SLOTS * CHUNK_BYTES)
                socket.send_fds(self._child.line, [REQUEST.pack(BEGIN, int(forked))], [userfaultfd, *files, buffer])
            except OSError as error:
                raise self._failed(error) from error
            self.layout = Layout(list(self._ranges()))

    def scan(self) -> int:
        """Protects the pages that were written since the last time, at first all. Returns how many bytes that are.

        They are read with `next`: before the next scan, or not at all."""
        return self._ask(SCAN)[0] * PAGE_BYTES

    def next(self) -> Chunk | None:
        """The next pages that the last scan has found; None if there are no more."""
        assert self._buffer is not None
        offset, length, used, bitmap = self._ask(NEXT, self._slot)
        if not length:
            return None
        if not (offset + length <= self.layout.size_bytes and 0 < used <= length <= CHUNK_BYTES):
            raise Internal(f"the child that follows process {self.process.pid} answers nonsense")
        at = self._slot * CHUNK_BYTES
        payload = self._buffer[at : at + used]
        self._slot = (self._slot + 1) % SLOTS
        return Chunk(offset, length, bitmap, payload)

    def finish(self) -> bytes:
        """The process is stopped: a byte for each slot of the layout, 1 if its page was returned by `next` and not written
        since. Nothing is tracked any more when this returns."""
        assert self._buffer is not None
        parts: list[bytes] = []
        while count := self._ask(FINISH, len(parts))[0]:
            parts.append(self._buffer[:count])
        self._child.end()
        found = b"".join(parts)
        if len(found) != self.layout.size_bytes // PAGE_BYTES:
            raise Internal(f"the child that follows process {self.process.pid} answers nonsense")
        return found

    def close(self) -> None:
        """Nothing is tracked any more when this returns. Idempotent."""
        with suppress(OSError):
            self._child.line.shutdown(socket.SHUT_RDWR)
        self._child.kill()
        self._child.close()

    def _ranges(self) -> Iterator[Range]:
        while True:
            count, _, _, data = self._receive()
            if not count:
                return
            yield from RANGE.iter_unpack(data)

    def _ask(self, operation: int, slot: int = 0) -> tuple[int, int, int, bytes]:
        self._send(operation, slot)
        return self._receive()

    def _send(self, operation: int, slot: int = 0) -> None:
        try:
            self._child.line.send(REQUEST.pack(operation, slot))
        except OSError as error:
            raise self._failed(error) from error

    def _receive(self) -> tuple[int, int, int, bytes]:
        try:
            message = self._child.line.recv(MESSAGE_BYTES)
        except OSError as error:
            raise self._failed(error) from error
        if len(message) < ANSWER.size:
            output = self._child.last_output()
            raise Internal(f"the child that follows process {self.process.pid} has ended{output and ': '}{output}")
        number, *found = ANSWER.unpack_from(message)
        if number:
            raise self._failed(OSError(number, os.strerror(number)))
        return found[0], found[1], found[2], message[ANSWER.size :]

    def _failed(self, error: OSError) -> SnapshotError:
        if not self.process.goes_on():
            return RankGone(f"process {self.process.pid} has ended", where=Where.ENDED)
        if isinstance(error, TimeoutError):
            return Internal(f"the memory of process {self.process.pid} did not answer within {LIMIT_S:.0f} s")
        return Internal(f"the memory of process {self.process.pid} cannot be followed: {error.strerror or error}")


def _take(mailbox: shimctl.Mailbox) -> int:
    """Has the shim make a userfaultfd, takes a copy, and has it closed there."""
    answer = mailbox.ask(Command.TRACK_OPEN, _OPEN_S)
    if answer.status:
        text = answer.text if answer.status != errno.EINVAL else "its library is older, or the kernel is"
        raise Unsupported(f"process {mailbox.process.pid}: {text}")
    try:
        with mailbox.process.pidfd() as pidfd:
            ours = int(_libc.syscall(*map(ctypes.c_long, (_PIDFD_GETFD, pidfd, answer.first, 0))))
            if ours < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        with suppress(SnapshotError):  # otherwise it closes it by itself some seconds later
            mailbox.ask(Command.TRACK_CLOSE, _OPEN_S)
    if os.readlink(f"/proc/self/fd/{ours}") != _USERFAULTFD:  # the job has closed and reused the number
        os.close(ours)
        raise OSError(errno.EBADF, "the process has closed its userfaultfd")
    return ours
