"""Copies pages between the memory of a process and a file, in children (page_copy_child.py) that can be killed.

Invariants:
- What is read or written is the memory of one process, whatever becomes of its pid: it is reached through one descriptor.
- No thread of the daemon waits for a page: it may never arrive (page_copy_child.py). A child that does not answer in time is
  killed, and so are all when the copy is given up. One that hangs in the kernel keeps no memory of the image meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from snapshotd.api.errors import SnapshotError, Undone
from snapshotd.criu.page_ranges import Ranges
from snapshotd.criu.pagemap_image import Piece
from snapshotd.moves import page_copy_child
from snapshotd.moves.page_copy_child import ANSWER, CHUNK_BYTES, MESSAGE_BYTES, MOVE, PIECE, PLACE, SAVE
from snapshotd.runtime import child_process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.child_process import ChildProcess

__all__ = ["MOVE", "PLACE", "SAVE", "Copy", "PageCopy", "packed"]

#: Descriptors of a memory and of a file, and what is copied between them.
Copy = tuple[int, int, Iterable[Piece]]

#: A page that was swapped out arrives within milliseconds, on a busy disk within seconds.
LIMIT_S = 30.0
#: Requests that a child has, so that it does not wait for the daemon.
_AHEAD = 3
_MOST_PIECES = MESSAGE_BYTES // PIECE.size


class PageCopy:
    """Children that copy. Used on one loop. `close` is due at the end, whatever has happened."""

    def __init__(self, whose: str) -> None:
        """`whose` memory, for errors."""
        self._whose = whose
        self._children: list[ChildProcess] = []

    async def start(self, count: int) -> Self:
        await in_thread(self._start, count)
        return self

    async def copy(self, direction: bytes, copies: Iterable[Copy], copied: Callable[[int], None]) -> None:
        """Copies all of it; `copied` is told how many bytes have been. Raises Undone if the process has ended or its memory
        does not answer, OSError, or Internal."""
        left = deque((memory, file, _requests(pieces)) for memory, file, pieces in copies)
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._work(child, direction, list(left), copied))
                    left.rotate(-1)  # each begins with another one: those that change one file wait for each other
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def close(self) -> None:
        """Kills the children. Idempotent."""
        for child in self._children:
            child.process.kill()
        await all_at_once(_end, self._children)
        self._children.clear()

    def _start(self, count: int) -> None:
        for _ in range(count):
            child = child_process.start(page_copy_child.__name__)
            self._children.append(child)
            child.line.setblocking(False)

    async def _work(
        self,
        child: ChildProcess,
        direction: bytes,
        copies: Iterable[tuple[int, int, Iterator[list[Piece]]]],
        copied: Callable[[int], None],
    ) -> None:
        """Has one child copy until nothing is left of any of them."""
        for memory, file, requests in copies:
            if (first := next(requests, None)) is not None:
                try:
                    socket.send_fds(child.line, [direction], [memory, file])
                except ConnectionError as error:
                    raise self._ended(child) from error
                await self._feed(child, itertools.chain([first], requests), copied)

    async def _feed(self, child: ChildProcess, requests: Iterator[list[Piece]], copied: Callable[[int], None]) -> None:
        """Has one child copy until there is no more of what it has."""
        loop = asyncio.get_running_loop()
        sizes: deque[int] = deque()
        try:
            async with asyncio.timeout(LIMIT_S) as limit:
                while True:
                    while len(sizes) < _AHEAD and (request := next(requests, None)) is not None:
                        sizes.append(sum(length for _, _, length in request))
                        await loop.sock_sendall(child.line, b"".join(PIECE.pack(*piece) for piece in request))
                    if not sizes:
                        return
                    self._check(child, await loop.sock_recv(child.line, ANSWER.size))
                    copied(sizes.popleft())
                    limit.reschedule(loop.time() + LIMIT_S)
        except TimeoutError as error:
            raise Undone(f"{self._whose} did not answer within {LIMIT_S:.0f} s") from error
        except ConnectionError as error:
            raise self._ended(child) from error

    def _check(self, child: ChildProcess, answer: bytes) -> None:
        if len(answer) != ANSWER.size:
            raise self._ended(child)
        (number,) = ANSWER.unpack(answer)
        if number == errno.ESRCH:
            raise Undone(f"{self._whose} has ended")
        if number:
            raise OSError(number, os.strerror(number))

    def _ended(self, child: ChildProcess) -> SnapshotError:
        output = child.last_output()
        return Undone(f"the child that copies {self._whose} has ended{output and ': '}{output}")


def packed(pages: Ranges) -> Iterator[Piece]:
    """The pages of these ranges as they lie in a file one after the other."""
    offset = 0
    for start, end in pages:
        yield offset, start, end - start
        offset += end - start


def _requests(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The same, a chunk at a time."""
    request: list[Piece] = []
    room = CHUNK_BYTES
    for first, start, size in pieces:
        offset, address, length = first, start, size
        while length:
            count = min(length, room)
            request.append((offset, address, count))
            offset, address, length, room = offset + count, address + count, length - count, room - count
            if not room or len(request) == _MOST_PIECES:
                yield request
                request, room = [], CHUNK_BYTES
    if request:
        yield request


def _end(child: ChildProcess) -> None:
    child.kill()
    child.close()
