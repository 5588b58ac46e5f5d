"""A process that maps a file whose pages never arrive: its own FUSE server answers everything except reads.

`silent_process.py FOLDER NAME` mounts the file system on FOLDER in a mount namespace of its own (with a third argument, in
the one that it is in), maps NAME from it, prints the address of the mapping, and waits for its standard input to end.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys

SIZE = 1 << 20
#: Whose file system it is. Of a user's, attributes never arrive either, once the file is mapped.
USER = int(os.environ.get("FUSE_USER", "0"))
VALID_S = 0 if USER else 3600
_HEADER_IN, _HEADER_OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ROOT, _FILE = 1, 2

libc = ctypes.CDLL(None, use_errno=True)


def _attributes(node: int) -> bytes:
    mode, size = (0o040755, 0) if node == _ROOT else (0o100644, SIZE)
    return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(operation: int, node: int) -> bytes | int | None:
    """The content of the answer, an errno, or None for no answer."""
    match operation:
        case 26:  # INIT
            return struct.pack("<4I2H2I2HI", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, 0) + bytes(28)
        case 1:  # LOOKUP
            return struct.pack("<4Q2I", _FILE, 0, VALID_S, VALID_S, 0, 0) + _attributes(_FILE)
        case 3:  # GETATTR
            return None if USER and node == _FILE else struct.pack("<Q2I", VALID_S, 0, 0) + _attributes(node)
        case 14:  # OPEN
            return struct.pack("<Q2I", 0, 0, 0)
        case 18 | 25:  # RELEASE, FLUSH
            return b""
        case 2 | 15 | 42:  # FORGET, READ, BATCH_FORGET
            return None
    return errno.ENOSYS


def serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:  # unmounted
            return
        _, operation, unique, node, *_ = _HEADER_IN.unpack_from(request)
        answer = _answer(operation, node)
        if isinstance(answer, int):
            os.write(device, _HEADER_OUT.pack(_HEADER_OUT.size, -answer, unique))
        elif answer is not None:
            os.write(device, _HEADER_OUT.pack(_HEADER_OUT.size + len(answer), 0, unique) + answer)


def main(folder: str, name: str, *here: str) -> None:
    if not here:
        libc.unshare(0x20000)  # CLONE_NEWNS
        libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={USER},group_id={USER},allow_other"
    if libc.mount(b"silent", os.fsencode(folder), b"fuse", 0, options.encode()) == -1:
        raise OSError(ctypes.get_errno(), "mount")
    if os.fork() == 0:
        serve(device)
        os._exit(0)
    os.close(device)
    file = os.open(f"{folder}/{name}", os.O_RDONLY)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(SIZE), mmap.PROT_READ, mmap.MAP_PRIVATE, file, ctypes.c_long(0))
    os.write(1, f"{address}\n".encode())
    os.read(0, 1)


main(*sys.argv[1:])
