"""Copies memory of a twin into a file of the image, in children (twin_copy_child.py) that can be killed.

Invariants:
- What is read is the memory of the twin, whatever becomes of its pid: it is reached through one descriptor, which was opened
  before the pages were compared with those of the rank (`opened`). A twin that executes a program, or another process that
  gets its pid, has other memory.
- No thread of the daemon waits for a page: it may never arrive (twin_copy_child.py). A child that does not answer in time is
  killed, and so are all when the copy is given up. One that hangs in the kernel keeps no memory of the image meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from snapshotd.api.errors import SnapshotError, Undone
from snapshotd.criu import page_ranges
from snapshotd.criu.page_ranges import Range, Ranges
from snapshotd.moves.source import twin_copy_child
from snapshotd.moves.source.process_memory import chunks
from snapshotd.moves.source.twin_copy_child import ANSWER, CHUNK_BYTES, OFFSET, RANGE
from snapshotd.moves.source.twins import Twin
from snapshotd.proc import status
from snapshotd.runtime import child_process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.child_process import ChildProcess

#: A page that was swapped out arrives within milliseconds, on a busy disk within seconds.
LIMIT_S = 30.0
#: Requests that a child has, so that it does not wait for the daemon.
_AHEAD = 3


def opened(twin: Twin) -> int:
    """A descriptor of the twin's memory. Raises OSError if it is not, or not certainly, the memory of a process that is the
    rank's user's alone: the user decides what becomes of a twin.

    The pages must be compared after this: if the twin executes a program before the descriptor is opened, it shares no page
    with the rank any more. The other checks are made after the file was opened, as in foreign_memory_child.py.
    """
    pid = twin.process.pid
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, rank = status.read(pid), status.read(twin.of)
        # A program that had more rights, and has given them up, is not dumpable: the kernel gives its files to root.
        owner = os.stat(f"/proc/{pid}/mem").st_uid
        if not twin.process.alive():
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        if (found.user_ids, found.group_ids) != (rank.user_ids, rank.group_ids) or owner != rank.user_id:
            raise PermissionError(errno.EPERM, "its user is not that of the rank")
    except BaseException:
        os.close(memory)
        raise
    return memory


class Copy:
    """One file on its way. Used on one loop. `close` is due at the end, whatever has happened."""

    def __init__(self, twin: Twin, memory: int, pages: Ranges, path: Path, written: Callable[[int], None]) -> None:
        self._twin, self._memory, self._path, self._written = twin, memory, path, written
        self._size_bytes = page_ranges.size_bytes(pages)
        self._chunks: Iterator[tuple[int, list[Range]]] = chunks(pages, CHUNK_BYTES)
        self._children: list[ChildProcess] = []
        self._file = -1

    async def run(self, readers: int) -> None:
        """Copies all pages. Raises Undone if the twin has ended or does not answer, OSError, or Internal."""
        try:
            await in_thread(self._start, readers)
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._feed(child))
            await in_thread(os.ftruncate, self._file, self._size_bytes)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def close(self, *, keep: bool) -> None:
        """Kills the children. `keep`: all was copied; otherwise the file gives its memory back, though a child hangs."""
        for child in self._children:
            child.process.kill()
        await all_at_once(_end, self._children)
        self._children.clear()
        if self._file >= 0:
            if not keep:
                await in_thread(os.ftruncate, self._file, 0)
            os.close(self._file)
            self._file = -1

    def _start(self, readers: int) -> None:
        self._path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        for _ in range(readers):
            child = child_process.start(twin_copy_child.__name__)
            self._children.append(child)
            child.line.setblocking(False)
            try:
                socket.send_fds(child.line, [b"\0"], [self._memory, self._file])
            except ConnectionError as error:
                raise self._ended(child) from error

    async def _feed(self, child: ChildProcess) -> None:
        """Has one child copy chunks until there are no more."""
        loop = asyncio.get_running_loop()
        sizes: deque[int] = deque()
        try:
            async with asyncio.timeout(LIMIT_S) as limit:
                while True:
                    while len(sizes) < _AHEAD and (chunk := next(self._chunks, None)) is not None:
                        offset, parts = chunk
                        sizes.append(page_ranges.size_bytes(parts))
                        request = OFFSET.pack(offset) + b"".join(RANGE.pack(*part) for part in parts)
                        await loop.sock_sendall(child.line, request)
                    if not sizes:
                        return
                    self._check(child, await loop.sock_recv(child.line, ANSWER.size))
                    self._written(sizes.popleft())
                    limit.reschedule(loop.time() + LIMIT_S)
        except TimeoutError as error:
            raise Undone(f"the twin of process {self._twin.of} did not answer within {LIMIT_S:.0f} s") from error
        except ConnectionError as error:
            raise self._ended(child) from error

    def _check(self, child: ChildProcess, answer: bytes) -> None:
        if len(answer) != ANSWER.size:
            raise self._ended(child)
        (number,) = ANSWER.unpack(answer)
        if number == errno.ESRCH:
            raise Undone(f"the twin of process {self._twin.of} has ended")
        if number:
            raise OSError(number, os.strerror(number))

    def _ended(self, child: ChildProcess) -> SnapshotError:
        output = child.last_output()
        return Undone(f"the child that copies the twin of process {self._twin.of} has ended{output and ': '}{output}")


def _end(child: ChildProcess) -> None:
    child.kill()
    child.close()
