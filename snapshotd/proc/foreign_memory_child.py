"""The process that reads and writes the memory of other processes, so that the daemon does not.

It has a stream socket as its standard input, and answers one request after the other:

    request   operation (1 byte), pid, start time or 0, address or offset or which file, bytes;
              then, for memory, the user whose process it must be and the bytes to write; or the two ends of a mapping;
              or the user and groups to become, whose second number says whether it will write memory
    answer    errno or 0, bytes; then these bytes

The first request is BECOME: the user and groups of the processes that it will look at. With them it enters a sandbox
(`Profile.MEMORY`, or `Profile.MEMORY_READING`), and never leaves it.

A page of a hostile process may never arrive, because a FUSE server or a userfaultfd that does not answer backs it. Then this
process waits in the kernel. It has no time limits: snapshotd/proc/foreign_memory.py has them. It imports little of the
daemon, which would be most of its memory and start-up time, and ends with its socket and with the daemon.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct

from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import CAP_DAC_READ_SEARCH, Ids
from snapshotd.sandbox.profiles import Profile

REQUEST = struct.Struct("<BiQQI")
ANSWER = struct.Struct("<iI")
MAPPING = struct.Struct("<QQ")
USER = struct.Struct("<I")
IDS = struct.Struct("<II")  # user and group; supplementary groups follow
READ, WRITE, READ_FILE, READ_MAPPED, BECOME = 1, 2, 3, 4, 5
#: Files of /proc/PID whose content comes from the process's memory, or whose reader waits for the lock of its mappings.
FILES = ("environ", "cmdline", "maps", "smaps_rollup")
#: Longest content of a file. The maps of a process that uses torch have less than 1 MiB; a hostile one can have gigabytes.
FILE_BYTES_MAX = 64 << 20

#: With whose id files are opened; -1 before BECOME.
_user_id = -1

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


def _check_user(operation: int, pid: int, user_id: int) -> None:
    """Raises PermissionError if the memory of a process is not that user's to read or to write.

    A set-user-id program may have made all its ids those of root, or given root up and kept what root had opened: it is then
    not dumpable, and the kernel gives its files to root.
    """
    with open(f"/proc/{pid}/status", "rb") as file:
        fields = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    users, groups = ({int(number) for number in fields[name].split()} for name in (b"Uid", b"Gid"))
    allowed = users == {user_id}
    if operation == WRITE:
        owner = os.stat(f"/proc/{pid}/mem").st_uid
        allowed = allowed and owner == user_id == _user_id and groups == {os.getegid()}
    if not allowed:
        raise PermissionError(errno.EPERM, "not a process of that user alone")


def _memory(operation: int, pid: int, start_ticks: int, address: int, size: int, user_id: int, data: bytes) -> bytes:
    memory = os.open(f"/proc/{pid}/mem", (os.O_RDWR if operation == WRITE else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        # Checked after the file was opened: from then on it is that memory, whichever process gets the pid, and whatever
        # program the process executes. The kernel changes memory and users at an exec under a lock that `open` takes too.
        if start_ticks and _start_ticks(pid) != start_ticks:
            raise ProcessLookupError(errno.ESRCH, "not that process any more")
        _check_user(operation, pid, user_id)
        if operation == READ:
            return os.pread(memory, size, address)
        if os.pwrite(memory, data, address) != len(data):
            raise OSError(errno.EIO, "an exec or the end of a mapping")
        return b""
    finally:
        os.close(memory)


def _file(pid: int, name: str, most_bytes: int) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        parts, left = [], most_bytes
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


def become(ids: Ids) -> bytes:
    """As a BECOME request carries it."""
    return IDS.pack(ids.user_id, ids.group_id) + struct.pack(f"<{len(ids.groups)}I", *ids.groups)


def _become(data: bytes, *, writes: bool) -> bytes:
    user_id, group_id = IDS.unpack_from(data)
    groups = struct.unpack(f"<{(len(data) - IDS.size) // 4}I", data[IDS.size :])
    # A process of root may have mapped files of every user. One of another user reads what that user can.
    profile = Profile.MEMORY if writes else Profile.MEMORY_READING
    enter(profile, Ids(user_id, group_id, groups), keep=(CAP_DAC_READ_SEARCH,) if user_id == 0 else ())
    global _user_id
    _user_id = user_id
    return b""


def _answer(operation: int, pid: int, start_ticks: int, where: int, size: int, data: bytes) -> bytes:
    if operation == READ_FILE:
        return _file(pid, FILES[where], size)
    if operation == BECOME:
        return _become(data, writes=bool(where))
    if operation == READ_MAPPED:
        start, end = MAPPING.unpack(data)
        return _mapped(pid, start, end, where, size)
    (user_id,) = USER.unpack_from(data)
    return _memory(operation, pid, start_ticks, where, size, user_id, data[USER.size :])


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=0) as connection:
        while True:
            try:
                operation, pid, start_ticks, where, size = REQUEST.unpack(receive(connection, REQUEST.size))
                more = {READ: USER.size, WRITE: USER.size + size, BECOME: size, READ_MAPPED: MAPPING.size}
                data = receive(connection, more.get(operation, 0))
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
