"""Which libraries an ELF file that a process has mapped asks the dynamic linker for.

The file is the rank's: it may be crafted. Every read has a fixed size and every loop a fixed end, so the work is bounded. The
program headers alone are used: they are what the dynamic linker used, and section headers can say anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from snapshotd.proc import foreign_memory
from snapshotd.proc.maps import Mapping

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<QQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5
_HEADERS_MAX = 64
_DYNAMIC_BYTES_MAX = 64 << 10
_NEEDED_MAX = 256
_NAME_BYTES_MAX = 256
_OFFSET_MAX = 1 << 62


def needed_libraries(pid: int, mapping: Mapping) -> list[str]:
    """The names in DT_NEEDED; empty if the file is not 64-bit ELF or not dynamically linked.

    Raises FileNotFoundError or ProcessLookupError if the process has ended, Timeout if the file does not answer.
    """

    def read(offset: int, size: int) -> bytes:
        return foreign_memory.read_mapped(pid, mapping.start, mapping.start + mapping.size_bytes, offset, size)

    return parse(read)


def parse(read_file: Callable[[int, int], bytes]) -> list[str]:
    """The same for a file that `read_file` reads: bytes from an offset, fewer at the end. They are untrusted."""

    def read(offset: int, size: int) -> bytes:
        return read_file(offset, size) if offset <= _OFFSET_MAX else b""

    header = read(0, _EHDR.size)
    if len(header) < _EHDR.size or not header.startswith(b"\x7fELF\x02\x01"):
        return []
    fields = _EHDR.unpack(header)
    if fields[9] != _PHDR.size:
        return []
    raw = read(fields[5], _PHDR.size * min(fields[10], _HEADERS_MAX))
    headers = list(_PHDR.iter_unpack(raw[: len(raw) // _PHDR.size * _PHDR.size]))
    dynamic = next((one for one in headers if one[0] == _PT_DYNAMIC), None)
    if dynamic is None:
        return []
    raw = read(dynamic[2], min(dynamic[5], _DYNAMIC_BYTES_MAX))
    offsets: list[int] = []
    names = None
    for tag, value in _ENTRY.iter_unpack(raw[: len(raw) // _ENTRY.size * _ENTRY.size]):
        if tag == _DT_NULL:
            break
        if tag == _DT_NEEDED and len(offsets) < _NEEDED_MAX:
            offsets.append(value)
        elif tag == _DT_STRTAB:
            names = _file_offset(headers, value)
    if names is None:
        return []
    texts = (read(names + offset, _NAME_BYTES_MAX).partition(b"\0") for offset in offsets)
    return [name.decode(errors="surrogateescape") for name, end, _ in texts if end]


def _file_offset(headers: list[tuple[int, ...]], address: int) -> int | None:
    for kind, _, offset, start, _, size, _, _ in headers:
        if kind == _PT_LOAD and start <= address < start + size:
            return offset + address - start
    return None
