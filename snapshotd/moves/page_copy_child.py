"""The child that copies pages between the memory of a process and a file: it has no user and no capability, and reaches only
two descriptors.

It enters its sandbox (`Profile.COPIER`) before it gets any. Then it answers one request after the other:

    request   a direction, with two descriptors: the memory of a process, and a file
    request   pieces: offset in the file, address, length
    answer    errno or 0; only to the second kind

The memory may be at a user's mercy, who may have a FUSE server or a userfaultfd back a page that was an ordinary one a
moment before. Such a page may never arrive. Then this process waits in the kernel. It has no time limits: page_copy.py has
them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Iterator

from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

#: Out of the memory into a new file; out of the file into the memory, and the same, with the file giving up what was copied.
SAVE, PLACE, MOVE = b"s", b"p", b"m"
PIECE = struct.Struct("<QQQ")
ANSWER = struct.Struct("<i")
#: A request asks for no more.
CHUNK_BYTES = 4 << 20
MESSAGE_BYTES = 64 << 10

_PAGE_BYTES = 4096
_ZERO_PAGE = bytes(_PAGE_BYTES)
_PR_SET_PDEATHSIG = 1
_KEEP_SIZE_AND_PUNCH_HOLE = 3
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


class Copier:
    def __init__(self, direction: bytes, memory: int, file: int) -> None:
        self._direction, self._memory, self._file = direction, memory, file
        self._buffer = bytearray(CHUNK_BYTES)

    def close(self) -> None:
        os.close(self._memory)
        os.close(self._file)

    def copy(self, offset: int, address: int, length: int) -> None:
        while length:
            count = min(length, CHUNK_BYTES)
            if self._direction == SAVE:
                self._save(offset, address, count)
            else:
                self._place(offset, address, count)
            offset, address, length = offset + count, address + count, length - count

    def _save(self, offset: int, address: int, length: int) -> None:
        """All but zero pages: the file is new, so a hole reads as zero."""
        # Not process_vm_readv: it goes by the pid, which may be that of another program by now, and has the kernel copy every
        # page that a twin shares.
        self._read(self._memory, address, length)
        self._write(self._file, offset, length)

    def _place(self, offset: int, address: int, length: int) -> None:
        """All but zero pages: the memory is new, too."""
        self._read(self._file, offset, length)
        self._write(self._memory, address, length)
        if self._direction == MOVE:
            where = ctypes.c_long(offset), ctypes.c_long(length)
            if _libc.fallocate(self._file, _KEEP_SIZE_AND_PUNCH_HOLE, *where):
                raise OSError(ctypes.get_errno(), "the file cannot give up what was copied")

    def _read(self, fd: int, position: int, length: int) -> None:
        with memoryview(self._buffer) as view:
            at = 0
            while at < length:
                at += _some(os.preadv(fd, [view[at:length]], position + at))

    def _write(self, fd: int, position: int, length: int) -> None:
        with memoryview(self._buffer) as view:
            for start, end in _runs(self._buffer, length, -position % _PAGE_BYTES):
                at = start
                while at < end:
                    at += _some(os.pwrite(fd, view[at:end], position + at))


def _some(count: int) -> int:
    if not count:
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    return count


def _runs(data: bytearray, length: int, first_page: int) -> Iterator[tuple[int, int]]:
    """The runs of this data that are to be written: all but zero pages, of which the first begins at `first_page`."""
    first_bytes = data[first_page:length:_PAGE_BYTES]
    begin = 0
    page = first_bytes.find(0)
    while page >= 0:
        at = first_page + page * _PAGE_BYTES
        if data.startswith(_ZERO_PAGE[: length - at], at):
            if at > begin:
                yield begin, at
            begin = min(at + _PAGE_BYTES, length)
        page = first_bytes.find(0, page + 1)
    if length > begin:
        yield begin, length


def _serve(line: socket.socket) -> None:
    copier: Copier | None = None
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 2)
        if not request:
            return
        if descriptors:
            if copier is not None:
                copier.close()
            copier = Copier(request, *descriptors)
            continue
        if copier is None:
            return
        number = 0
        try:
            for piece in PIECE.iter_unpack(request):
                copier.copy(*piece)
        except OSError as error:
            number = error.errno or errno.EIO
        line.send(ANSWER.pack(number))


def main() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    line = socket.socket(fileno=os.dup(0))
    enter(Profile.COPIER, Ids(_NOBODY, _NOBODY))
    _serve(line)
    os._exit(0)


if __name__ == "__main__":
    main()
