"""What the image channel carries: chunks of image files one way, answers the other.

A chunk is one header message and, if it has payload, one payload message after it on the same stream. They are two messages
so that the payload is sent exactly as it was read: joining the header to it would copy every byte once more. The frames are
the same over gRPC (grpc_channel.py) and over bulk connections (bulk_sender.py, bulk_receiver.py).

Invariant: a frame does not depend on others. It names its file and its offset, so chunks may arrive over any stream, in any
order and twice. The digest covers every header field and the payload. It is a fast one over bulk connections, which only the
two daemons can read, and a cryptographic one over gRPC, where network processes pass the chunks on. Zero pages are not sent:
a bitmap tells which pages are in the payload, the others are holes.

All parsers here handle untrusted bytes: malformed input raises `Damaged` before memory is allocated or a path is touched.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from snapshotd.api.errors import Damaged

VERSION = 1
#: With a digest for which no other chunk can be found: SHA-256, of which 128 bits are kept.
STRONG_VERSION = 2
PAGE_BYTES = 4096
MAX_CHUNK_BYTES = 8 << 20
MAX_FILE_BYTES = 1 << 40
DIGEST_BYTES = 16
BLOCK_DIGEST_BYTES = 16

IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")

_MAGIC = b"SNPI"
#: magic, version, kind, length of the name, sequence, offset, length, payload length; the digest follows.
_HEADER = struct.Struct(">4sBBBxQQQI")
_ANSWER = struct.Struct(">4sBBxxQ")
_HEADER_BYTES = _HEADER.size + DIGEST_BYTES
_MAX_TEXT_BYTES = 16 << 10
_ZERO_PAGE = bytes(PAGE_BYTES)
_ZERO_DIGIT = ord("0")


class Kind(IntEnum):
    DATA = 1  # `length` bytes of a file at `offset`, some of whose pages may be zero
    HOLE = 2  # `length` zero bytes at `offset`; an empty file is a hole of no length
    BLOCKS = 3  # `length` bytes, of which the payload has digests of some blocks instead of their content (blocks.py)
    OK = 16  # the chunk with this sequence is verified and stored
    BAD = 17  # it arrived damaged and must be sent again
    MISSING = 19  # of a BLOCKS: the text is a bitmap of the blocks whose content must be sent
    ERROR = 18  # the stream has ended; the text is an encoded SnapshotError


@dataclass(slots=True)
class Frame:
    """A chunk of an image file. `payload` holds the pages whose bit is set, or everything where there is no bitmap."""

    kind: Kind
    sequence: int  # the sender's number for this chunk, repeated in the answer
    name: str
    offset: int
    length: int
    bitmap: bytes = b""
    payload_bytes: int = 0
    digest: bytes = b""
    payload: bytes | bytearray | memoryview = b""
    strong: bool = False  # whether the digest is a cryptographic one

    def prepare(self) -> None:
        """Leaves out zero pages and computes the digest, as every frame needs before it is sent. Idempotent.

        It takes a while, so streams do it in threads: of several, while the next chunk is read. Copies only if some pages are
        zero."""
        if self.digest:
            return
        if self.kind is Kind.DATA:
            self.leave_out_zero_pages()
        self.digest = self.computed_digest()

    def leave_out_zero_pages(self) -> None:
        assert not isinstance(self.payload, memoryview)
        self.bitmap = zero_bitmap(self.payload)
        if self.bitmap:
            view = memoryview(self.payload)
            self.payload = b"".join(view[start:end] for start, end in _runs(self.bitmap, self.length))
            self.payload_bytes = len(self.payload)
        if not self.payload_bytes:
            self.kind, self.bitmap = Kind.HOLE, b""

    def header(self) -> bytes:
        name = self.name.encode()
        return b"".join((self._fields(name), self.digest, name, self.bitmap))

    def computed_digest(self) -> bytes:
        name = self.name.encode()
        state = hashlib.sha256(self._fields(name)) if self.strong else xxhash.xxh3_128(self._fields(name))
        state.update(name)
        state.update(self.bitmap)
        state.update(self.payload)
        return state.digest()[:DIGEST_BYTES]

    def intact(self) -> bool:
        """Whether header and payload are what the sender digested."""
        return len(self.payload) == self.payload_bytes and self.computed_digest() == self.digest

    def runs(self) -> Iterator[tuple[int, int]]:
        """The (start, end) ranges of the chunk that are in the payload, in order; the rest of the chunk is zero."""
        if self.payload_bytes:
            yield from _runs(self.bitmap, self.length) if self.bitmap else [(0, self.length)]

    def _fields(self, name: bytes) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            STRONG_VERSION if self.strong else VERSION,
            *(self.kind, len(name), self.sequence, self.offset, self.length, self.payload_bytes),
        )


def raw_frame(sequence: int, name: str, offset: int, data: bytes | bytearray, *, strong: bool = False) -> Frame:
    """The frame for `data`, not prepared yet."""
    return Frame(Kind.DATA, sequence, name, offset, len(data), payload_bytes=len(data), payload=data, strong=strong)


def data_frame(sequence: int, name: str, offset: int, data: bytes | bytearray, *, strong: bool = False) -> Frame:
    """The prepared frame for `data`; a hole if all of it is zero."""
    frame = raw_frame(sequence, name, offset, data, strong=strong)
    frame.prepare()
    return frame


def hole_frame(sequence: int, name: str, offset: int, length: int, *, strong: bool = False) -> Frame:
    frame = Frame(Kind.HOLE, sequence, name, offset, length, strong=strong)
    frame.prepare()
    return frame


def parse_header(message: bytes) -> Frame:
    """The frame that a header announces, without its payload. Damaged unless the header is valid."""
    blob = message
    if len(blob) < _HEADER_BYTES:
        raise Damaged(f"truncated frame: {len(blob)} bytes where a header has at least {_HEADER_BYTES}")
    magic, version, kind, name_bytes, sequence, offset, length, payload_bytes = _HEADER.unpack_from(blob)
    if magic != _MAGIC or version not in (VERSION, STRONG_VERSION):
        raise Damaged(f"not a frame of version {VERSION} or {STRONG_VERSION}: it begins with {blob[:5]!r}")
    if kind not in (Kind.DATA, Kind.HOLE, Kind.BLOCKS):
        raise Damaged(f"frame of kind {kind} where a chunk was expected")
    digest = blob[_HEADER.size : _HEADER_BYTES]
    raw_name = blob[_HEADER_BYTES : _HEADER_BYTES + name_bytes]
    bitmap = blob[_HEADER_BYTES + name_bytes :]
    name = raw_name.decode("ascii", errors="replace")
    if len(raw_name) != name_bytes or not IMAGE_NAME.fullmatch(name):
        raise Damaged(f"{name!r} is not the name of an image file")
    if offset + length > MAX_FILE_BYTES:
        raise Damaged(f"{name}: a chunk at {offset} of {length} bytes lies beyond {MAX_FILE_BYTES} bytes")
    frame = Frame(Kind(kind), sequence, name, offset, length, bitmap, payload_bytes, digest)
    frame.strong = version == STRONG_VERSION
    if frame.kind is Kind.BLOCKS:
        _check_blocks(frame)
        return frame
    expected = _payload_expected(frame)
    if payload_bytes != expected:
        raise Damaged(f"{name}: the chunk at {offset} announces {payload_bytes} bytes, its bitmap {expected}")
    return frame


def _check_blocks(frame: Frame) -> None:
    """That its payload is no larger than two bitmaps and the content: only the first and last block may be shorter than a
    digest."""
    if not 0 < frame.length <= MAX_CHUNK_BYTES or frame.bitmap:
        raise Damaged(f"{frame.name}: {frame.length} bytes with a bitmap of {len(frame.bitmap)} are offered")
    most_blocks = frame.length // PAGE_BYTES + 2
    most_bytes = 2 * -(-most_blocks // 8) + 2 * BLOCK_DIGEST_BYTES + frame.length
    if not 0 < frame.payload_bytes <= most_bytes:
        raise Damaged(f"{frame.name}: the chunk at {frame.offset} is offered with {frame.payload_bytes} bytes")


def _payload_expected(frame: Frame) -> int:
    if frame.kind is Kind.HOLE:
        if frame.bitmap:
            raise Damaged(f"{frame.name}: a hole has a bitmap")
        return 0
    if not 0 < frame.length <= MAX_CHUNK_BYTES:
        raise Damaged(f"{frame.name}: a chunk of {frame.length} bytes; at most {MAX_CHUNK_BYTES} are allowed")
    if not frame.bitmap:
        return frame.length
    pages = -(-frame.length // PAGE_BYTES)
    if len(frame.bitmap) != -(-pages // 8):
        raise Damaged(f"{frame.name}: a bitmap of {len(frame.bitmap)} bytes for {pages} pages")
    if int.from_bytes(frame.bitmap, "little") >> pages:
        raise Damaged(f"{frame.name}: a bitmap names pages beyond the chunk's {pages}")
    expected = sum(end - start for start, end in _runs(frame.bitmap, frame.length))
    if not expected:
        raise Damaged(f"{frame.name}: a chunk of zero pages alone must be a hole")
    return expected


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's answer to a chunk; with ERROR, about the whole stream."""

    kind: Kind
    sequence: int = 0
    text: bytes = b""

    def message(self) -> bytes:
        return _ANSWER.pack(_MAGIC, VERSION, self.kind, self.sequence) + self.text[:_MAX_TEXT_BYTES]


def parse_answer(message: bytes) -> Answer:
    blob = message
    if not _ANSWER.size <= len(blob) <= _ANSWER.size + _MAX_TEXT_BYTES:
        raise Damaged(f"the target sent an answer of {len(blob)} bytes, which is invalid")
    magic, version, kind, sequence = _ANSWER.unpack_from(blob)
    if magic != _MAGIC or version != VERSION or kind not in (Kind.OK, Kind.BAD, Kind.MISSING, Kind.ERROR):
        raise Damaged(f"the target sent an invalid answer: {blob[:16]!r}")
    return Answer(Kind(kind), sequence, blob[_ANSWER.size :])


def zero_bitmap(data: bytes | bytearray) -> bytes:
    """One bit per page, lowest first, set if the page is not all zero; empty if no page is all zero.

    A strided slice takes the first byte of every page at C speed. Only a page whose first byte is zero is compared, in place
    and up to its first other byte.
    """
    whole, tail = divmod(len(data), PAGE_BYTES)
    first_bytes = data[: whole * PAGE_BYTES : PAGE_BYTES]
    digits = bytearray(b"1" * (whole + bool(tail)))
    page = first_bytes.find(0)
    while page >= 0:
        if data.startswith(_ZERO_PAGE, page * PAGE_BYTES):
            digits[page] = _ZERO_DIGIT
        page = first_bytes.find(0, page + 1)
    if tail and data.endswith(_ZERO_PAGE[:tail]):
        digits[whole] = _ZERO_DIGIT
    if _ZERO_DIGIT not in digits:
        return b""
    return int(digits[::-1], 2).to_bytes(-(-len(digits) // 8), "little")


def _runs(bitmap: bytes, length: int) -> list[tuple[int, int]]:
    """The byte ranges of the set bits, adjacent ones joined, the last one cut at `length`."""
    # `find` on digits: shifting a number of a thousand bits once per run took longer than copying the pages.
    digits = f"{int.from_bytes(bitmap, 'little'):b}"[::-1] + "0"
    runs = []
    start = digits.find("1")
    while start >= 0:
        end = digits.find("0", start)
        runs.append((start * PAGE_BYTES, min(end * PAGE_BYTES, length)))
        start = digits.find("1", end)
    return runs
