"""Files that are sent in several rounds while a rank runs: the pages of a later round replace those of earlier ones.

Each round is an image file of its own to the channel, with its own chunks and digests, and is sealed like every other. But
all rounds of a file are written into one file on the target, whose name they begin with. What a round does not have is a
hole in it, and leaves the file as it is. The source begins a round when the target has stored the one before.

Invariant: a page that is in a round, and in no later one, has that round's content, which its digest covered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from snapshotd.transport.image.frame import PAGE_BYTES, Frame

_ROUND = re.compile(r"(ahead-pages-[0-9]{1,9}-1\.img)\.[0-9]{1,6}")


def round_name(file: str, number: int) -> str:
    return f"{file}.{number}"


def file_of(name: str) -> str:
    """The file on the target that an image file is written into; most are their own."""
    found = _ROUND.fullmatch(name)
    return found[1] if found else name


def is_round(name: str) -> bool:
    return _ROUND.fullmatch(name) is not None


@dataclass(slots=True)
class Covered:
    """The pages that were written, of all rounds of a move: what is replaced takes no more memory."""

    _pages: dict[tuple[str, int], int] = field(default_factory=dict)

    def all_of(self, frame: Frame) -> bool:
        """Whether every page of this chunk is in some round."""
        every = (1 << -(-frame.length // PAGE_BYTES)) - 1
        return is_round(frame.name) and self._pages.get((file_of(frame.name), frame.offset), 0) & every == every

    def add(self, frame: Frame) -> int:
        """The bytes that are new with this chunk."""
        if not is_round(frame.name) or not frame.payload_bytes:
            return frame.payload_bytes
        key = (file_of(frame.name), frame.offset)
        pages = -(-frame.length // PAGE_BYTES)
        bits = int.from_bytes(frame.bitmap, "little") if frame.bitmap else (1 << pages) - 1
        before = self._pages.get(key, 0)
        self._pages[key] = before | bits
        return (bits & ~before).bit_count() * PAGE_BYTES
