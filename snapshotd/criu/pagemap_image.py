"""pagemap-N.img: which pages of a process lie in its pages-M.img, and which in the images below it.

The bytes of the pages marked PRESENT lie in pages-M.img in the order of the entries. A page marked IN_PARENT has no bytes
there: criu finds it, at the same address, in the pagemap of the same number in the folder that is named `parent`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from pycriu.images import magic, pb

from snapshotd.criu import page_ranges
from snapshotd.criu.page_ranges import Range, Ranges

PAGE_BYTES = 4096
IN_PARENT, LAZY, PRESENT = 1, 2, 4

_HEADER = struct.pack("<II", magic.by_name["IMG_COMMON"], magic.by_name["PAGEMAP"])
_SIZE = struct.Struct("<I")
#: No process has memory beyond this address (57 bits, of which user space has the lower half).
_LAST = 1 << 56

#: A piece of a file of pages: its offset, the address at which it belongs, and its length.
Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Pagemap:
    """The content of one file. `present` are the pages that lie in `pages-{pages_id}.img`, `below` the others. Both are sets
    of disjoint ranges; no page is in both."""

    pages_id: int
    present: list[Range]
    below: list[Range]

    def has(self) -> list[Range]:
        return page_ranges.joined([*self.present, *self.below])


class Pagemaps(dict[str, Pagemap]):
    """The pagemaps of one image by their names, each decoded when it is first asked for. Raises OSError or ValueError."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Pagemap:
        found = self[name] = decode((self.folder / name).read_bytes())
        return found

    def replace(self, name: str, pagemap: Pagemap) -> None:
        """Also in the image."""
        (self.folder / name).write_bytes(encode(pagemap))
        self[name] = pagemap


def name_of(pid: int) -> str:
    return f"pagemap-{pid}.img"


def pages_name(pages_id: int) -> str:
    return f"pages-{pages_id}.img"


def decode(content: bytes) -> Pagemap:
    """Raises ValueError for anything that criu does not write: entries out of order, of no page, or of unknown kinds."""
    if content[: len(_HEADER)] != _HEADER:
        raise ValueError("it does not begin like a pagemap")
    try:
        messages = _messages(content)
        head = pb.pagemap_head.FromString(next(messages))
        present: list[Range] = []
        below: list[Range] = []
        kinds = {PRESENT: present, PRESENT | LAZY: present, IN_PARENT: below}
        last, parse = 0, pb.pagemap_entry.FromString
        for message in messages:  # a rank has many, and waits: calls of functions would take most of the time
            entry = parse(message)
            start = entry.vaddr
            end = start + (entry.nr_pages or _compat_pages(entry)) * PAGE_BYTES
            if start < last or start % PAGE_BYTES or not start < end <= _LAST:
                raise _impossible(entry, last)
            last = end
            ranges = kinds.get(entry.flags)
            if ranges is None or entry.in_parent:
                ranges = below if _in_parent(entry) else present
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
    except (StopIteration, struct.error, DecodeError) as error:
        raise ValueError(f"it cannot be parsed: {error!r}") from error
    return Pagemap(int(head.pages_id), present, below)


def encode(pagemap: Pagemap) -> bytes:
    """The file with these entries."""
    head = pb.pagemap_head(pages_id=pagemap.pages_id).SerializeToString()
    parts = [_HEADER, _SIZE.pack(len(head)), head]
    marked = [(start, end, PRESENT) for start, end in pagemap.present]
    marked += [(start, end, IN_PARENT) for start, end in pagemap.below]
    entry = pb.pagemap_entry(vaddr=0, compat_nr_pages=0, nr_pages=0, flags=0)
    for entry.vaddr, end, entry.flags in sorted(marked):
        entry.nr_pages = (end - entry.vaddr) // PAGE_BYTES
        message = entry.SerializeToString()
        parts += (_SIZE.pack(len(message)), message)
    return b"".join(parts)


def located(present: Ranges, wanted: Ranges) -> Iterator[Piece]:
    """Where these addresses lie in a file that has all of `present` in this order."""
    ranges = iter(present)
    (first, last), offset = next(ranges, (0, 0)), 0
    for start, end in page_ranges.common(present, wanted):
        while last <= start:
            offset += last - first
            first, last = next(ranges)
        yield offset + start - first, start, end - start


def _messages(content: bytes) -> Iterator[bytes]:
    at, length, unpack = len(_HEADER), len(content), _SIZE.unpack_from
    while at < length:
        begin = at + _SIZE.size
        at = begin + unpack(content, at)[0]
        if at > length:
            raise ValueError("it ends early")
        yield content[begin:at]


def _compat_pages(entry: Any) -> int:
    """How many pages an entry has that has none of the newer field."""
    return 0 if entry.HasField("nr_pages") else int(entry.compat_nr_pages)


def _impossible(entry: Any, last: int) -> ValueError:
    if entry.vaddr < last:
        return ValueError(f"the entry at {entry.vaddr:x} is not in order")
    pages = entry.nr_pages or _compat_pages(entry)
    return ValueError(f"the entry of {pages} pages at {entry.vaddr:x} is impossible")


def _in_parent(entry: Any) -> bool:
    """Raises ValueError for an entry that is both here and below, or neither: criu would read the pages from nowhere."""
    if entry.in_parent:
        return True
    flags = int(entry.flags) if entry.HasField("flags") else PRESENT
    if flags == IN_PARENT:
        return True
    if flags & ~LAZY != PRESENT:
        raise ValueError(f"the entry at {int(entry.vaddr):x} has the flags {flags:x}")
    return False
