"""Finds the address of a library's symbol in the memory of another process.

Both the process's mappings and the mapped file are read. The file is reached through the mapping, because it may have been
deleted, or another file may have its path in this mount namespace. Its content is untrusted: it may be no library at all.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from elftools.elf.elffile import ELFFile

from snapshotd.proc import maps

_FILE_BYTES_MAX = 16 << 20
_ADDRESS_MAX = 1 << 47
_KNOWN_MAX = 16
#: What was found, by symbol and identity of the file: all processes of all ranks on a node usually map the same one.
_known: dict[tuple[str, int, int, int, int, int], int] = {}


def address(pid: int, libraries: tuple[str, ...], name: str) -> int | None:
    """Where a dynamic symbol of the first of `libraries` that is loaded is in a process; None where none of them is.

    Raises ValueError when the mapped file is no 64-bit library or has no such symbol; FileNotFoundError or ProcessLookupError
    when the process has ended.
    """
    loaded = _loaded(pid, libraries)
    return loaded[1] + _symbol_in(loaded[0], name) if loaded else None


def _loaded(pid: int, libraries: tuple[str, ...]) -> tuple[Path, int] | None:
    """The mapped file, and the address of its first byte."""
    names = tuple(map(os.fsencode, libraries))
    lines = [line for line in maps.read_raw(pid).splitlines() if any(name in line for name in names)]
    for mapping in maps.parse(b"\n".join(lines)):
        if mapping.offset == 0 and os.path.basename(mapping.path.removesuffix(maps.DELETED)) in libraries:
            return Path(maps.map_file(pid, mapping)), mapping.start
    return None


def _symbol_in(file: Path, name: str) -> int:
    """The address of a dynamic symbol, relative to where the file is loaded."""
    with file.open("rb") as opened:
        about = os.fstat(opened.fileno())
        key = (name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if key not in _known:
            if len(_known) >= _KNOWN_MAX:
                _known.clear()
            _known[key] = _symbol(opened.read(_FILE_BYTES_MAX), name)
        return _known[key]


def _symbol(content: bytes, name: str) -> int:
    try:
        elf = ELFFile(io.BytesIO(content))
        table = elf.get_section_by_name(".dynsym")
        found = table.get_symbol_by_name(name) if table is not None and elf.elfclass == 64 else None
        value = next((int(symbol["st_value"]) for symbol in found or () if symbol["st_shndx"] != "SHN_UNDEF"), None)
    except Exception as error:  # pyelftools raises exceptions of any type for a file that is not a library
        raise ValueError(f"not a 64-bit ELF library: {error!r}") from error
    if value is None or value >= _ADDRESS_MAX:
        raise ValueError(f"no symbol {name} that could be in memory")
    return value
