"""Chunks that are offered: most of their blocks as digests, because the target may have those blocks in other images.

Replicas of a data-parallel job have equal weights, and a rank changes only part of its memory between two snapshots. So the
source sends the digests of a chunk's blocks, the target names those that it misses, and the source sends the chunk again with
their content. The pages of a rank lie in its image in another order than those of another rank, but begin at whole pages.

Invariant: the digest of an offered chunk is that of the whole chunk. The target puts the chunk together, verifies it as if it
had been sent plainly, and stores the same. What is sealed and signed does not depend on what was found where.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from snapshotd.api.errors import Damaged
from snapshotd.transport.image.frame import BLOCK_DIGEST_BYTES, PAGE_BYTES, Answer, Frame, Kind

#: A smaller chunk is sent plainly: an offer takes one more round trip. Chunks end at holes, so many are small.
MIN_OFFER_BYTES = PAGE_BYTES

#: Of stripes of device memory, which are long and in order. Each block costs some microseconds besides its digest.
_DEVICE_BLOCK_BYTES = 64 << 10
_ZEROS = memoryview(bytes(_DEVICE_BLOCK_BYTES))

Span = tuple[int, int]  # start and end


def block_bytes_of(name: str) -> int:
    """The size of the blocks of an image file."""
    return _DEVICE_BLOCK_BYTES if name.startswith("device-") else PAGE_BYTES


def spans_of(name: str, offset: int, length: int) -> list[Span]:
    """The blocks of a chunk, as ranges of the file. They end at multiples of the block's size in the file, and at the end of
    the chunk."""
    block_bytes, end = block_bytes_of(name), offset + length
    cuts = range((offset // block_bytes + 1) * block_bytes, end, block_bytes)
    return list(zip([offset, *cuts], [*cuts, end], strict=True))


def block_digest(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()[:BLOCK_DIGEST_BYTES]


class Offer:
    """A chunk of data that is offered, on the source. `messages` are made in threads, one after the other."""

    def __init__(self, frame: Frame) -> None:
        """`frame` is not prepared yet."""
        self.frame = frame
        self._raw = bytes(frame.payload)  # no copy of what was read from a file
        self._digests: dict[int, bytes] = {}  # by number of the block; zero blocks have none
        self._missing: frozenset[int] | None = None  # what the target has not found; None: not offered yet
        self._plain = False
        self.sent_bytes = 0  # of all messages
        self.content_bytes = 0  # … of them content, in the last message

    def message(self) -> Frame:
        """What is to be sent now: digests, digests and content, or the plain chunk."""
        self.frame.prepare()
        message = self.frame if self._plain or self.frame.kind is Kind.HOLE else self._offered()
        self.sent_bytes += message.payload_bytes
        if message is self.frame:
            self.content_bytes = message.payload_bytes
        return message

    def refused(self, answer: Answer) -> None:
        """The target misses blocks, or what it has put together is not this chunk. It is sent plainly if that happens for the
        second time, and if all blocks are missing."""
        missing = (
            frozenset(_numbers(answer.text)) & self._digests.keys() if answer.kind is Kind.MISSING else frozenset()
        )
        self._plain = self._plain or self._missing is not None or not missing or len(missing) == len(self._digests)
        self._missing = missing

    def _offered(self) -> Frame:
        frame, view = self.frame, memoryview(self._raw)
        spans = [(start - frame.offset, end - frame.offset) for start, end in spans_of(*_where(frame))]
        blocks = [view[start:end] for start, end in spans]
        if not self._digests:
            has = [has_data(self._raw, start, end) for start, end in spans]
            self._digests = {number: block_digest(block) for number, block in enumerate(blocks) if has[number]}
        missing = self._missing or frozenset()
        found = [number for number in self._digests if number not in missing]
        content = [blocks[number] for number in sorted(missing)]
        self.content_bytes = sum(len(block) for block in content)
        bitmaps = _bitmap(found, len(spans)) + _bitmap(missing, len(spans))
        payload = b"".join((bitmaps, *(self._digests[number] for number in found), *content))
        return Frame(
            *(Kind.BLOCKS, frame.sequence, frame.name, frame.offset, frame.length),
            payload_bytes=len(payload),
            digest=frame.digest,
            payload=payload,
            strong=frame.strong,
        )


@dataclass(slots=True)
class Offered:
    """An offered chunk, on the target."""

    frame: Frame
    spans: list[Span]
    digests: dict[int, bytes]  # by number of the block
    contents: dict[int, memoryview]

    @classmethod
    def parse(cls, frame: Frame) -> Offered:
        """Damaged unless the payload has what its bitmaps announce."""
        spans = spans_of(*_where(frame))
        bitmap_bytes, payload = -(-len(spans) // 8), memoryview(frame.payload)
        by_digest, by_content = (_numbers(bytes(payload[start : start + bitmap_bytes])) for start in (0, bitmap_bytes))
        sizes = [spans[number][1] - spans[number][0] for number in by_content if number < len(spans)]
        expected = 2 * bitmap_bytes + len(by_digest) * BLOCK_DIGEST_BYTES + sum(sizes)
        beyond = any(number >= len(spans) for number in (*by_digest, *by_content))
        if beyond or len(payload) != expected or set(by_digest) & set(by_content):
            raise Damaged(f"{frame.name}: the blocks of the chunk at {frame.offset} contradict its length")
        at, digests, contents = 2 * bitmap_bytes, {}, {}
        for number in by_digest:
            digests[number] = bytes(payload[at : at + BLOCK_DIGEST_BYTES])
            at += BLOCK_DIGEST_BYTES
        for number, size in zip(by_content, sizes, strict=True):
            contents[number] = payload[at : at + size]
            at += size
        return cls(frame, spans, digests, contents)

    def missing(self, numbers: list[int]) -> bytes:
        """What the answer names them with."""
        return _bitmap(numbers, len(self.spans))

    def whole(self, data: bytearray) -> Frame:
        """The chunk that was put together as `data`, with the digest that it has to have."""
        frame = self.frame
        whole = Frame(
            *(Kind.DATA, frame.sequence, frame.name, frame.offset, frame.length),
            payload_bytes=len(data),
            payload=data,
            strong=frame.strong,
        )
        whole.leave_out_zero_pages()
        whole.digest = frame.digest
        return whole


def has_data(data: bytes, start: int, end: int) -> bool:
    """Whether any byte of this block is not zero."""
    return data[start] != 0 or not data.startswith(_ZEROS[: end - start], start)


def _where(frame: Frame) -> tuple[str, int, int]:
    return frame.name, frame.offset, frame.length


def _bitmap(numbers: frozenset[int] | list[int], count: int) -> bytes:
    """One bit per block, lowest first."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits.to_bytes(-(-count // 8), "little")


def _numbers(bitmap: bytes) -> list[int]:
    digits = f"{int.from_bytes(bitmap, 'little'):b}"[::-1]
    return [number for number, digit in enumerate(digits) if digit == "1"]
