"""FIFOs: the file ends when the last writer has closed it, not before the first one has opened it."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from snapshotd.transport.image.fifo import Stop, make_fifo, read_chunk, readable


def read(fd: int, limit_bytes: int) -> tuple[bytes, Stop]:
    buffer = bytearray(limit_bytes)
    count, stop = read_chunk(fd, buffer, 0)
    return bytes(buffer[:count]), stop


def open_writer(tmp_path: Path) -> int:
    return os.open(tmp_path / "pages-1.img", os.O_WRONLY | os.O_NONBLOCK)


def test_fifo_is_private_large_and_non_blocking(tmp_path: Path) -> None:
    fd = make_fifo(tmp_path, "pages-1.img", 1 << 20)
    assert (tmp_path / "pages-1.img").stat().st_mode & 0o777 == 0o600
    assert fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) == 1 << 20
    assert not os.get_inheritable(fd)
    assert read(fd, 100) == (b"", Stop.NO_WRITER)
    os.close(fd)


def test_fifo_is_as_large_as_the_kernel_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not allow an unprivileged user more than fs.pipe-max-size."""
    real = fcntl.fcntl

    def limited(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETPIPE_SZ and argument > 1 << 18:
            raise PermissionError(1, "Operation not permitted")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", limited)
    fd = make_fifo(tmp_path, "pages-1.img", 1 << 20)
    assert real(fd, fcntl.F_GETPIPE_SZ) == 1 << 18
    os.close(fd)


def test_chunk_is_filled_from_pieces(tmp_path: Path) -> None:
    fd = make_fifo(tmp_path, "pages-1.img")
    writer = open_writer(tmp_path)
    os.write(writer, b"a" * 10)
    assert read(fd, 4) == (b"aaaa", Stop.FULL)
    assert read(fd, 100) == (b"a" * 6, Stop.STALLED)
    os.write(writer, b"b" * 3)
    os.close(writer)
    assert read(fd, 100) == (b"bbb", Stop.NO_WRITER)
    os.close(fd)


async def test_wait_does_not_return_before_there_is_a_writer(tmp_path: Path) -> None:
    fd = make_fifo(tmp_path, "pages-1.img")
    waiting = asyncio.create_task(readable(fd, None))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
    writer = open_writer(tmp_path)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.05)
    os.write(writer, b"x")
    await asyncio.wait_for(waiting, 60)
    os.close(writer)
    assert read(fd, 10) == (b"x", Stop.NO_WRITER)
    await asyncio.wait_for(readable(fd, None), 60)  # the writer is gone: reported at once
    os.close(fd)


async def test_wait_ends_with_the_dump(tmp_path: Path) -> None:
    fd = make_fifo(tmp_path, "pages-1.img")
    eof = asyncio.Event()
    waiting = asyncio.create_task(readable(fd, eof))
    await asyncio.sleep(0)
    eof.set()
    await asyncio.wait_for(waiting, 60)
    os.close(fd)
