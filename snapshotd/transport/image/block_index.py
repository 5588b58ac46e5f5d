"""Finds blocks of images by their digests. It holds positions, not content.

Memory: 30 to 36 bytes for each block that differs from all others, 0.9 % of images with blocks of 4 KiB, and a little more
while it grows (`most_bytes`).
`find` may be called from any thread while one thread adds files.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.transport.image.blocks import block_bytes_of, block_digest, has_data, spans_of
from snapshotd.transport.image.frame import BLOCK_DIGEST_BYTES
from snapshotd.transport.image.sparse_file import data_ranges

_READ_BYTES = 1 << 20
_OFFSET_BITS = 40  # as MAX_FILE_BYTES
_FIRST_SLOTS = 1 << 10
#: The most that one block takes, while the table grows: 16 of its digest and 8 of its place, each an eighth more because they
#: grow in steps, 12 of its slots, and 6 of those of the smaller table.
_MOST_BYTES = 48


def most_bytes(path: Path) -> int:
    """The most memory that an index of this file takes. Raises OSError."""
    return -(-path.stat().st_blocks * 512 // block_bytes_of(path.name)) * _MOST_BYTES


@dataclass(slots=True)
class BlockIndex:
    files: list[Path] = field(default_factory=list)
    _digests: bytearray = field(default_factory=bytearray)
    _places: array[int] = field(default_factory=lambda: array("Q"))  # number of the file, offset in it
    #: Open addressing, at most two thirds full: 1 + number of the block, 0 in an empty slot.
    _table: array[int] = field(default_factory=lambda: array("I", bytes(4 * _FIRST_SLOTS)))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def memory_bytes(self) -> int:
        return len(self._digests) + self._places.itemsize * len(self._places) + self._table.itemsize * len(self._table)

    def add(self, path: Path) -> None:
        """Adds the blocks of a file that does not change. Raises OSError. Blocking; takes seconds for each GiB."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            number = len(self.files)
            self.files.append(path)
            for start, end in data_ranges(fd):
                self._add_range(path.name, fd, number << _OFFSET_BITS, start, end)
        finally:
            os.close(fd)

    def _add_range(self, name: str, fd: int, place: int, start: int, end: int) -> None:
        while start < end:
            stop = min(end, (start // _READ_BYTES + 1) * _READ_BYTES)  # at the end of a block
            data = os.pread(fd, stop - start, start)
            if len(data) < stop - start:  # it became shorter
                return
            view = memoryview(data)
            for first, last in spans_of(name, start, stop - start):
                if has_data(data, first - start, last - start):
                    self._insert(block_digest(view[first - start : last - start]), place + first)
            start = stop

    def find(self, digest: bytes) -> tuple[Path, int] | None:
        """The file and the offset at which a block with this digest was."""
        table = self._table
        number = table[self._slot(table, digest)]
        if not number:
            return None
        place = self._places[number - 1]
        return self.files[place >> _OFFSET_BITS], place & ((1 << _OFFSET_BITS) - 1)

    def _insert(self, digest: bytes, place: int) -> None:
        table = self._table
        slot = self._slot(table, digest)
        if table[slot]:
            return
        self._digests += digest
        self._places.append(place)
        number = len(self._places)
        table[slot] = number  # last: from now on it is found
        if 3 * number > 2 * len(table):
            self._grow()

    def _grow(self) -> None:
        table = array("I", bytes(4 * 2 * len(self._table)))
        for number in range(len(self._places)):
            at = number * BLOCK_DIGEST_BYTES
            table[self._slot(table, bytes(self._digests[at : at + BLOCK_DIGEST_BYTES]))] = number + 1
        self._table = table

    def _slot(self, table: array[int], digest: bytes) -> int:
        """The slot of this digest, or the empty one where it belongs."""
        mask, digests = len(table) - 1, self._digests
        slot = int.from_bytes(digest[:8], "little") & mask
        while number := table[slot]:
            if digests.startswith(digest, (number - 1) * BLOCK_DIGEST_BYTES):  # compares in place
                break
            slot = (slot + 1) & mask
        return slot
