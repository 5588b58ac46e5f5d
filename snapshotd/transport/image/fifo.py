"""FIFOs in CRIU's images directory: CRIU writes what it takes for a file, and the source never holds the pages twice.

The reading end is opened before there is a writer, without blocking. Then `read() == b""` means "no writer", which is
"not yet" before the first byte and "finished" after it; `BlockingIOError` means that a writer is there and slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
from enum import Enum, auto
from pathlib import Path

#: CRIU fills the pipe while the lane is busy: as large as a chunk, so that one read takes a whole one.
PIPE_BYTES = 4 << 20


class Stop(Enum):
    """Why a read ended."""

    FULL = auto()  # the limit was reached
    STALLED = auto()  # the writer has nothing at the moment
    NO_WRITER = auto()  # nobody holds the writing end


def make_fifo(directory: Path, name: str, pipe_bytes: int = PIPE_BYTES) -> int:
    """A FIFO of mode 0600 at directory/name and the descriptor of its reading end, not blocking.

    The pipe is made as large as the kernel allows, up to `pipe_bytes`: root may exceed fs.pipe-max-size, others not.
    """
    path = directory / name
    os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    while pipe_bytes > fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, pipe_bytes)
            break
        pipe_bytes //= 2
    return fd


def read_chunk(fd: int, limit_bytes: int, patience_ms: int) -> tuple[bytes, Stop]:
    """Up to `limit_bytes` from a pipe that does not block; waits `patience_ms` for a slow writer. In a thread.

    One read that fills the chunk is handed on as it is; only a chunk that came in pieces is copied together.
    """
    pieces: list[bytes] = []
    missing_bytes = limit_bytes
    stop = Stop.FULL
    while missing_bytes:
        try:
            piece = os.read(fd, missing_bytes)
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(patience_ms):
                continue
            stop = Stop.STALLED
            break
        if not piece:
            stop = Stop.NO_WRITER
            break
        pieces.append(piece)
        missing_bytes -= len(piece)
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), stop


async def readable(fd: int, eof: asyncio.Event | None) -> None:
    """Waits, with no thread and no polling, until the pipe has bytes, has lost its last writer, or `eof` is set.

    A FIFO that has not had a writer yet is not reported by epoll as hung up, so this does not spin before the dump.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    waits = [loop.create_task(event.wait()) for event in (ready, eof) if event is not None]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(fd)
        for wait in waits:
            wait.cancel()
