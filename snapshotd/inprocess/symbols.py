"""Finds the mailbox of libsnapshim.so in the memory of another process.

Nothing is read from the file that a process has mapped under that name: it belongs to the rank's user and may be crafted so
that parsing it takes hours, or be on a file system that never answers. Where the mailbox is inside the library is read from
the library that this installation ships, and from what former installations on this node shipped, because a rank keeps the
library that it was started with. The build id in the process's memory says which of them it has loaded.

So a library is accepted under any path and in any mount namespace or container, if it is a build that this node knows. A
process that forges a build id only misleads the daemon about its own memory, where everything is checked anyway.

Invariant: the work for one process is constant except for reading its list of mappings.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from shim.keeper.library import KEPT
from snapshotd.api.errors import BadConfig
from snapshotd.inprocess import abi
from snapshotd.proc import foreign_memory, maps
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

_SYMBOL = "snapshim_mailbox"
_INSTALLED = Path(__file__).parents[2] / "shim" / "lib"
#: The build id is in a note right behind the program headers.
_HEAD_BYTES = 4096
_HEADERS_MAX = 32
_BUILD_ID_BYTES_MAX = 64
_ADDRESS_MAX = 1 << 47
#: How many builds are kept across upgrades.
_KNOWN_MAX = 64
_FILE = "shims.json"

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3


class Builds:
    """The builds of the library that this node knows: build id -> offset of the mailbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[bytes, int] = {}
        self._read: dict[Path, tuple[int, ...]] = {}  # identity of the files that were read
        self._kept: Path | None = None

    def learn(self, library: Path) -> None:
        """Adds a library that is trusted. Raises BadConfig if it has no mailbox or no build id."""
        build_id, offset = _build(library)
        with self._lock:
            if self._known.get(build_id) == offset:
                return
            self._known[build_id] = offset
            for oldest in list(self._known)[:-_KNOWN_MAX]:
                del self._known[oldest]
            self._keep()

    def keep_in(self, folder: Path) -> None:
        """Remembers builds in a folder that only root can write to, so that ranks survive an upgrade."""
        with self._lock:
            self._kept = folder / _FILE
            try:
                kept = json.loads(self._kept.read_text())
                former = {bytes.fromhex(name): int(offset) for name, offset in kept.items()}
                self._known = {**former, **self._known}
            except FileNotFoundError:
                pass
            except (ValueError, AttributeError) as error:
                log.warning("%s is damaged and is made again: %s", self._kept, error)
        self.learn_installed()

    def learn_installed(self) -> None:
        """Adds the libraries that the installation has now, if they are new: it may be upgraded under a running daemon."""
        kept = _INSTALLED.glob(f"{KEPT}/*/libsnapshim*.so")  # of former installations, where the package keeps them
        for path in (*sorted(kept), *sorted(_INSTALLED.glob("libsnapshim*.so"))):
            about = path.stat()
            identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
            if self._read.get(path) != identity:
                self.learn(path)
                self._read[path] = identity

    def offset(self, build_id: bytes) -> int | None:
        if build_id not in self._known:
            self.learn_installed()
        return self._known.get(build_id)

    def problem(self, build_id: bytes, abi_version: int) -> str:
        """Why this daemon cannot talk to such a library, or ""."""
        if abi_version != abi.ABI_VERSION:
            return (
                f"its library has version {abi_version} of the interface to snapshotd, and snapshotd here has version"
                f" {abi.ABI_VERSION}"
            )
        return "" if self.offset(build_id) is not None else f"its library (build {build_id.hex()}) is not known here"

    def _keep(self) -> None:
        if self._kept is not None:
            new = self._kept.with_suffix(".new")
            new.write_text(json.dumps({name.hex(): offset for name, offset in self._known.items()}))
            new.rename(self._kept)


builds = Builds()


def mailbox_address(process: Process, user_id: int, libraries: Iterable[str]) -> int | None:
    """Where the mailbox is in a user's process that has loaded one of `libraries`; None where it has loaded none.

    Raises ValueError when what is mapped under that name is no build that this node knows; FileNotFoundError or
    ProcessLookupError when the process has ended, PermissionError when it is not of that user alone, Timeout when its memory
    does not answer.
    """
    start = _loaded(process.pid, frozenset(libraries))
    if start is None:
        return None
    try:
        head = foreign_memory.read(process.pid, process.start_ticks, start, _HEAD_BYTES, user_id=user_id)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        raise
    except OSError as error:
        raise ValueError(f"its first page cannot be read: {error}") from error
    build_id = build_id_in(head)
    if build_id is None:
        raise ValueError("it has no build id")
    offset = builds.offset(build_id)
    if offset is None:
        raise ValueError(f"build {build_id.hex()} is not known on this node")
    return start + offset


def build_id_in(head: bytes) -> bytes | None:
    """The GNU build id in the first page of a 64-bit ELF file; None if there is none. The page is untrusted."""
    if len(head) < _EHDR.size or not head.startswith(b"\x7fELF\x02\x01"):
        return None
    fields = _EHDR.unpack_from(head)
    headers, size, count = fields[5], fields[9], fields[10]
    if size != _PHDR.size or count > _HEADERS_MAX or headers + count * size > len(head):
        return None
    for index in range(count):
        kind, _, offset, _, _, length, _, _ = _PHDR.unpack_from(head, headers + index * size)
        if kind == _PT_NOTE and offset + length <= len(head):
            found = _in_notes(head[offset : offset + length])
            if found is not None:
                return found
    return None


def _in_notes(notes: bytes) -> bytes | None:
    at = 0
    while at + _NOTE.size <= len(notes):
        owner_bytes, size, kind = _NOTE.unpack_from(notes, at)
        owner = at + _NOTE.size
        content = owner + (owner_bytes + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[owner : owner + owner_bytes] == b"GNU\0":
            found = notes[content : content + size]
            return found if 0 < len(found) == size <= _BUILD_ID_BYTES_MAX else None
        at = content + (size + 3 & ~3)
    return None


def _loaded(pid: int, libraries: frozenset[str]) -> int | None:
    """The address of the first byte of the library."""
    lines = _lines_with(maps.read_raw(pid), map(os.fsencode, libraries))
    for mapping in maps.parse(b"\n".join(lines)):
        if mapping.offset == 0 and os.path.basename(mapping.path.removesuffix(maps.DELETED)) in libraries:
            return mapping.start
    return None


def _lines_with(text: bytes, names: Iterable[bytes]) -> list[bytes]:
    """The lines that contain one of the names, in order. Looks for the names, not at every line: a process with hundreds of
    threads has more than a thousand, and its list is read for every request."""
    found: dict[int, bytes] = {}
    for name in names:
        at = text.find(name)
        while at != -1:
            begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
            end = len(text) if end == -1 else end
            found[begin] = text[begin:end]
            at = text.find(name, end)
    return [found[begin] for begin in sorted(found)]


def _build(library: Path) -> tuple[bytes, int]:
    """Build id, and where the mailbox is relative to the file's first byte in memory."""
    try:
        with library.open("rb") as file:
            build_id = build_id_in(file.read(_HEAD_BYTES))
            table = ELFFile(file).get_section_by_name(".dynsym")
            found = table.get_symbol_by_name(_SYMBOL) if table is not None else None
    except (OSError, ELFError) as error:
        raise BadConfig(f"{library} cannot be read: {error}", remedy="install snapshotd again") from error
    offset = next((int(symbol["st_value"]) for symbol in found or () if symbol["st_shndx"] != "SHN_UNDEF"), None)
    if build_id is None or offset is None or not 0 < offset < _ADDRESS_MAX:
        raise BadConfig(f"{library} has no build id or no {_SYMBOL}", remedy="build it with the Makefile in shim/")
    return build_id, offset
