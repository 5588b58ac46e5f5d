"""Sends what a rank has written since its memory was sent before the freeze: one more round, with the rank frozen.

It is read beside criu, as large memory is (large_memory.py), by several threads. Then the target has all pages of the
mappings that were followed, in one file, and criu has none of them: a job writes here and there, and its image would have an
entry for every few pages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from snapshotd.criu import page_ranges
from snapshotd.criu.below import Layer
from snapshotd.criu.page_ranges import Range
from snapshotd.moves.precopied import Precopied, SentMemory
from snapshotd.moves.source.process_memory import ProcessMemory
from snapshotd.proc.files import GONE
from snapshotd.proc.page_frames import PAGE_BYTES, NotSupported, PageFrames
from snapshotd.transport.image.frame import Frame, Kind, hole_frame, zero_bitmap
from snapshotd.transport.image.overlay import round_name
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)

#: Slots whose pages the target does not have as they are now.
_OLD = re.compile(rb"\0+")


@dataclass(frozen=True, slots=True)
class LastRound:
    """What one process has written."""

    sent: SentMemory
    layer: Layer

    @property
    def pid(self) -> int:
        return self.sent.followed.pid

    @property
    def files(self) -> Sequence[str]:
        return [self._file]

    @property
    def _file(self) -> str:
        return round_name(self.sent.followed.file, self.sent.followed.rounds + 1)

    @property
    def size_bytes(self) -> int:
        return max(0, page_ranges.size_bytes(self.layer.pages) - self.sent.current.count(1) * PAGE_BYTES)

    def frames(self, sender: Sender, memory: ProcessMemory) -> Iterator[Callable[[int], Frame]]:
        at = 0
        for offset, length, address, parts in self.sent.layout.chunks(self.layer.pages):
            if not (slots := self._old(offset, length, address, parts)):
                continue
            if offset > at:
                yield partial(self._hole, sender, at, offset - at)
            at = offset + length
            yield partial(self._frame, sender, memory, offset, length, address, slots)
        if at < self.sent.layout.size_bytes:
            yield partial(self._hole, sender, at, self.sent.layout.size_bytes - at)

    def _hole(self, sender: Sender, offset: int, length: int, sequence: int) -> Frame:
        return hole_frame(sequence, self._file, offset, length, strong=sender.strong)

    def _frame(
        self,
        sender: Sender,
        memory: ProcessMemory,
        offset: int,
        length: int,
        address: int,
        slots: Sequence[Range],
        sequence: int,
    ) -> Frame:
        """`slots`: where the pages that are sent begin and end in this chunk."""
        content = bytearray(page_ranges.size_bytes(slots))
        memory.fill([(address + start, address + end) for start, end in slots], memoryview(content))
        digits = bytearray(b"0" * (length // PAGE_BYTES))
        for start, end in slots:
            digits[start // PAGE_BYTES : end // PAGE_BYTES] = b"1" * ((end - start) // PAGE_BYTES)
        data: bytes | bytearray = content
        if with_content := zero_bitmap(content):
            data = self._without_zeros(content, with_content, digits, self.sent.followed.filled.get(offset, 0))
        if not data:
            return self._hole(sender, offset, length, sequence)
        bitmap = int(digits[::-1], 2).to_bytes(-(-len(digits) // 8), "little")
        frame = Frame(
            *(Kind.DATA, sequence, self._file, offset, length),
            bitmap=bitmap,
            payload_bytes=len(data),
            payload=data,
            strong=sender.strong,
        )
        frame.digest = frame.computed_digest()
        return frame

    def _old(self, offset: int, length: int, address: int, parts: Sequence[Range]) -> list[Range]:
        """What of this chunk is sent: where the pages begin and end in it."""
        flags = self.sent.current[offset // PAGE_BYTES : (offset + length) // PAGE_BYTES]
        return [
            (run.start() * PAGE_BYTES, run.end() * PAGE_BYTES)
            for start, end in parts
            for run in _OLD.finditer(flags, (start - address) // PAGE_BYTES, (end - address) // PAGE_BYTES)
        ]

    @staticmethod
    def _without_zeros(data: bytearray, with_content: bytes, digits: bytearray, filled: int) -> bytes:
        """Leaves out zero pages whose slot on the target is empty: it reads as zero. Others replace what is there."""
        bits, kept = int.from_bytes(with_content, "little"), []
        slots = [slot for slot, digit in enumerate(digits) if digit == ord("1")]
        for page, slot in enumerate(slots):
            if bits >> page & 1 or filled >> slot & 1:
                kept.append(data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            else:
                digits[slot] = ord("0")
        return b"".join(kept)


def find(precopied: Precopied) -> list[LastRound]:
    """Of each process whose memory was sent, if it can be read. The rank is frozen. Blocking."""
    found = []
    for one in precopied.ahead:
        try:
            with PageFrames(one.followed.pid) as frames:
                pages = page_ranges.common(frames.private(plain=True), one.layout.ranges)
        except (*GONE, NotSupported, OSError) as error:
            log.warning("what was sent of process %d before the freeze does not count: %s", one.followed.pid, error)
        else:
            layer = Layer(pid=one.followed.inner_pid, pages=pages, parent=None, rounds=[one.layout.ranges])
            if pages:  # else the target needs nothing of what was sent
                found.append(LastRound(one, layer))
    return found
