"""/proc/PID/maps: the mappings of a process that have a name, which are those of files, devices and shared memory."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.proc import foreign_memory

#: Appended by the kernel to the path of a file whose name was removed.
DELETED = " (deleted)"

#: span, permissions, offset, device, inode and path of every mapping that is not plain anonymous memory
_MAPPING = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d{1,20}) +([^\[\s].*)$", re.MULTILINE
)
#: device and inode of every mapping that has an inode
_INODE = re.compile(rb"^\S+ \S{4} \S+ ([0-9a-f]{1,7}):([0-9a-f]{1,7}) ([1-9]\d{0,19}) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mapping:
    span: str  # its name in the map_files directory
    readable: bool
    writable: bool
    executable: bool
    shared: bool
    offset: int
    device: str
    inode: int
    path: str

    @property
    def start(self) -> int:
        return int(self.span.partition("-")[0], 16)

    @property
    def size_bytes(self) -> int:
        return int(self.span.partition("-")[2], 16) - self.start


def parse(text: bytes, prefixes: tuple[str, ...] = ("",)) -> Iterator[Mapping]:
    """The named mappings whose path begins with one of `prefixes`."""
    wanted = tuple(os.fsencode(prefix) for prefix in prefixes)
    for fields in _MAPPING.findall(text):
        if fields[-1].startswith(wanted):
            yield _mapping(*fields)


@functools.lru_cache(maxsize=1 << 14)
def _mapping(span: bytes, bits: bytes, offset: bytes, device: bytes, inode: bytes, path: bytes) -> Mapping:
    """Remembered, because forked processes have the same mappings, and a frozen rank is looked at several times."""
    return Mapping(
        span="-".join(end.lstrip("0") or "0" for end in span.decode().split("-")),  # map_files does not pad
        readable=bits[0] == 0x72,
        writable=bits[1] == 0x77,
        executable=bits[2] == 0x78,
        shared=bits[3] == 0x73,
        offset=int(offset, 16),
        device=device.decode(),
        inode=int(inode),
        path=os.fsdecode(path.replace(b"\\012", b"\n")),
    )


def parse_inodes(text: bytes) -> set[tuple[int, int]]:
    """(st_dev, st_ino) of everything mapped. Much quicker than `parse`: for searches through all processes of a node."""
    pairs = {(int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in set(_INODE.findall(text))}
    return {(os.makedev(major, minor), inode) for major, minor, inode in pairs}


def read(pid: int, prefixes: tuple[str, ...] = ("",)) -> Iterator[Mapping]:
    """The named mappings of a process. Raises FileNotFoundError or ProcessLookupError if it has ended."""
    return parse(read_raw(pid), prefixes)


def read_raw(pid: int, limit_s: float = foreign_memory.LIMIT_S) -> bytes:
    """The file as it is, for a search that needs no fields. About a millisecond for a process that uses torch.

    Raises FileNotFoundError or ProcessLookupError if the process has ended, Timeout if the kernel does not answer: the
    process can hold the lock of its mappings.
    """
    return foreign_memory.read_file(pid, "maps", limit_s)


def map_file(pid: int, mapping: Mapping) -> str:
    """A path that opens the mapped file even if its name was removed, or is another file's in this mount namespace."""
    return f"/proc/{pid}/map_files/{mapping.span}"


def device_number(text: str) -> int:
    """The device of a mapping (hexadecimal MAJOR:MINOR), as st_dev."""
    major, _, minor = text.partition(":")
    return os.makedev(int(major, 16), int(minor, 16))
