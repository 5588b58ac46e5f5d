"""The process that reads and writes the memory of other processes, so that the daemon does not.

`python -I -S foreign_memory_child.py`, with a stream socket as its standard input. It answers one request after the other:

    request   operation (1 byte), pid, start time or 0, address or offset or which file, bytes;
              then the bytes to write, or the two ends of a mapping
    answer    errno or 0, bytes; then these bytes

A page of a hostile process may never arrive, because a FUSE server or a userfaultfd that does not answer backs it. Then this
process waits in the kernel. It has no time limits: snapshotd/proc/foreign_memory.py has them. It imports nothing of the
daemon, which would be most of its memory and start-up time, and ends with its socket and with the daemon.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct

REQUEST = struct.Struct("<BiQQI")
ANSWER = struct.Struct("<iI")
MAPPING = struct.Struct("<QQ")
READ, WRITE, READ_FILE, READ_MAPPED = 1, 2, 3, 4
#: Files of /proc/PID whose content comes from the process's memory, or whose reader waits for the lock of its mappings.
FILES = ("environ", "cmdline", "maps", "smaps_rollup")
#: Longest content of a file. The maps of a process that uses torch have less than 1 MiB; a hostile one can have gigabytes.
FILE_BYTES_MAX = 64 << 20

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 1 << 20


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises EOFError if the connection ends before."""
    parts = []
    while size:
        part = connection.recv(min(size, _CHUNK_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _start_ticks(pid: int) -> int:
    """0 if the process is dead. The same as snapshotd/proc/stat.py."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def _memory(operation: int, pid: int, start_ticks: int, address: int, size: int, data: bytes) -> bytes:
    memory = os.open(f"/proc/{pid}/mem", (os.O_RDWR if operation == WRITE else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        # Checked after the file was opened: from then on it belongs to that process's memory, whoever gets the pid.
        if start_ticks and _start_ticks(pid) != start_ticks:
            raise ProcessLookupError(errno.ESRCH, "not that process any more")
        if operation == READ:
            return os.pread(memory, size, address)
        os.pwrite(memory, data, address)
        return b""
    finally:
        os.close(memory)


def _file(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        parts, left = [], FILE_BYTES_MAX
        while part := file.read(_CHUNK_BYTES):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise OSError(errno.EFBIG, "too large")
        return b"".join(parts)


def _mapped(pid: int, start: int, end: int, offset: int, size: int) -> bytes:
    file = os.open(f"/proc/{pid}/map_files/{start:x}-{end:x}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def _answer(operation: int, pid: int, start_ticks: int, where: int, size: int, data: bytes) -> bytes:
    if operation == READ_FILE:
        return _file(pid, FILES[where])
    if operation == READ_MAPPED:
        start, end = MAPPING.unpack(data)
        return _mapped(pid, start, end, where, size)
    return _memory(operation, pid, start_ticks, where, size, data)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=0) as connection:
        while True:
            try:
                operation, pid, start_ticks, where, size = REQUEST.unpack(receive(connection, REQUEST.size))
                data = receive(connection, {WRITE: size, READ_MAPPED: MAPPING.size}.get(operation, 0))
            except (EOFError, OSError):
                return
            try:
                found = _answer(operation, pid, start_ticks, where, size, data)
                answer = ANSWER.pack(0, len(found)) + found
            except OSError as error:
                answer = ANSWER.pack(error.errno or errno.EIO, 0)
            except OverflowError:  # an address that no file offset can have
                answer = ANSWER.pack(errno.EIO, 0)
            connection.sendall(answer)


if __name__ == "__main__":
    main()
