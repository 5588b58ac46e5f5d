"""Where a library's symbols are in the memory of another process.

Read from the process's mappings and from the very file that is mapped, which may be deleted since, or be in a mount
namespace where its path is another file's. What is read was written by others: it is never trusted to make sense.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path


def address(pid: int, library: str, name: bytes) -> int | None:
    """Where a dynamic symbol of a library is in the memory of a process; None where that library is not loaded.

    Raises LookupError when the library has no such symbol; LookupError, ValueError, OverflowError or struct.error when it is
    no library at all; FileNotFoundError or ProcessLookupError when the process has ended.
    """
    place = _loaded_at(pid, library)
    return place[1] + _symbol(place[0], name) if place else None


def _loaded_at(pid: int, library: str) -> tuple[Path, int] | None:
    """The file that is mapped into a process, and where its first byte is."""
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or int(fields[2], 16) != 0:
            continue
        if os.path.basename(fields[5].removesuffix(" (deleted)")) == library:
            # By its mapping: it may be deleted since, or be in a mount namespace where that path is another file.
            return Path(f"/proc/{pid}/map_files/{fields[0]}"), int(fields[0].partition("-")[0], 16)
    return None


def _symbol(file: Path, name: bytes) -> int:
    """The address of a dynamic symbol of a 64-bit little-endian ELF file, relative to where it is loaded."""
    with file.open("rb") as opened:
        data = opened.read(16 << 20)
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    table_at, entry_bytes, entries = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58))
    sections = [struct.unpack_from("<IIQQQQII", data, table_at + index * entry_bytes) for index in range(entries)]
    for _name_at, kind, _flags, _address, at, size, link, _info in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for entry in range(at, at + size, 24):
            text_at, _kind, _other, section, value = struct.unpack_from("<IBBHQ", data, entry)
            if section and data[strings + text_at : strings + text_at + len(name) + 1] == name + b"\0":
                if value >= 1 << 47:
                    raise ValueError("a symbol beyond any address space")
                return int(value)
    raise KeyError(name)
