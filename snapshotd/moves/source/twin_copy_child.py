"""The child that copies memory of a twin into a file: it has no user and no capability, and reaches only two descriptors.

It enters its sandbox (`Profile.COPIER`) before it gets them: the memory of the twin, and the file. Then it answers one
request after the other:

    request   offset in the file; then pages, as pairs of addresses
    answer    errno or 0

A twin is at its user's mercy, who may have a FUSE server or a userfaultfd back a page that was an ordinary one a moment
before. Such a page may never arrive. Then this process waits in the kernel. It has no time limits: twin_copy.py has them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Iterable, Iterator

from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

OFFSET = struct.Struct("<Q")
RANGE = struct.Struct("<QQ")
ANSWER = struct.Struct("<i")
#: A request asks for no more.
CHUNK_BYTES = 4 << 20
MESSAGE_BYTES = 64 << 10

_PAGE_BYTES = 4096
_ZERO_PAGE = bytes(_PAGE_BYTES)
_PR_SET_PDEATHSIG = 1
_NOBODY = 65534


def _read(memory: int, parts: Iterable[tuple[int, int]], buffer: memoryview) -> int:
    """Reads these pages, one after the other; how many bytes that are."""
    at = 0
    for start, end in parts:
        address = start
        while address < end:
            # Not process_vm_readv: it goes by the pid, which may be that of another program by now, and has the kernel copy
            # every page that the twin shares.
            count = os.preadv(memory, [buffer[at : at + end - address]], address)
            if not count:
                raise ProcessLookupError(errno.ESRCH, "it has ended")
            at, address = at + count, address + count
    return at


def _write(file: int, offset: int, data: memoryview) -> None:
    """Writes all but zero pages: the file is new, so a hole reads as zero."""
    for start, end in _runs(data):
        at = start
        while at < end:
            at += os.pwrite(file, data[at:end], offset + at)


def _runs(data: memoryview) -> Iterator[tuple[int, int]]:
    """The runs of pages that are not zero."""
    begin = 0
    for at in range(0, len(data), _PAGE_BYTES):
        if data[at] == 0 and data[at : at + _PAGE_BYTES] == _ZERO_PAGE:
            if at > begin:
                yield begin, at
            begin = at + _PAGE_BYTES
    if len(data) > begin:
        yield begin, len(data)


def _serve(line: socket.socket) -> None:
    _, descriptors, _, _ = socket.recv_fds(line, 1, 2)
    if len(descriptors) != 2:
        return
    memory, file = descriptors
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while request := line.recv(MESSAGE_BYTES):
        (offset,) = OFFSET.unpack_from(request)
        number = 0
        try:
            _write(file, offset, buffer[: _read(memory, RANGE.iter_unpack(request[OFFSET.size :]), buffer)])
        except OSError as error:
            number = error.errno or errno.EIO
        line.send(ANSWER.pack(number))


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    line = socket.socket(fileno=os.dup(0))
    enter(Profile.COPIER, Ids(_NOBODY, _NOBODY))
    _serve(line)
    os._exit(0)


if __name__ == "__main__":
    main()
