"""FIFOs in CRIU's image directory: CRIU writes to them as to files, so the source never holds the pages twice.

The reading end is opened without blocking, before there is a writer. `read() == b""` then means "no writer": "not yet" before
the first byte, "finished" after it. `BlockingIOError` means that a writer exists and is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import sys
import termios
from enum import Enum, auto
from pathlib import Path

#: CRIU fills the pipe while the channel is busy: as large as a chunk, so that one read returns a whole one.
PIPE_BYTES = 4 << 20


class Stop(Enum):
    """Why a read ended."""

    FULL = auto()  # the limit was reached
    STALLED = auto()  # the writer has nothing at the moment
    NO_WRITER = auto()  # the writing end is not open


def make_fifo(directory: Path, name: str, pipe_bytes: int = PIPE_BYTES) -> int:
    """Creates a FIFO of mode 0600 at directory/name; returns the non-blocking descriptor of its reading end.

    The pipe is made as large as the kernel allows, up to `pipe_bytes`: only root may exceed fs.pipe-max-size.
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


def read_chunk(fd: int, buffer: bytearray, patience_ms: int) -> tuple[int, Stop]:
    """Fills the buffer from a non-blocking pipe; waits `patience_ms` for a slow writer. Blocks. Returns how much was read."""
    view = memoryview(buffer)
    filled = 0
    while filled < len(view):
        try:
            count = os.readv(fd, [view[filled:]])
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(patience_ms):
                continue
            return filled, Stop.STALLED
        if not count:
            return filled, Stop.NO_WRITER
        filled += count
    return filled, Stop.FULL


def unread_bytes(fd: int) -> int:
    """How many bytes are in the pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


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
