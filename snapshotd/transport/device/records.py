"""What travels in a stripe: records one way, a few replies the other. Read by the children alone, so nothing heavy here.

A record is a header and, with DATA, its payload. The records of a stripe come in order and without gaps: the receiver's
file is always the beginning of the sender's. Zeros travel as a length, a repetition as the place of its twin.

Invariant: the header has a check of its own, the digest is that of the record's bytes whatever way they travel, and
both are verified before the file grows; where the connection is sealed (connection.py), its tag stands for the digest
of DATA. What a stranger sends is `Trouble`, in words, before anything is allocated for it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

#: A megabyte fits the core's own cache: what was read is digested and encrypted there, and received, checked and written.
RECORD_BYTES = 1 << 20
MAX_RECORD_BYTES = 8 << 20
MAX_STRIPE_BYTES = 1 << 40
DIGEST_BYTES = 16

_MAGIC = b"SNST"
#: magic, kind, length, offset, offset of the twin, digest; the header's own check follows.
_FIELDS = struct.Struct(">4sBxxxIQQ16s")
_CHECK_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
#: magic, kind, value, length of the text that follows.
_REPLY = struct.Struct(">4sBxxxQI")
REPLY_BYTES = _REPLY.size
MAX_TEXT_BYTES = 8 << 10


class Kind(IntEnum):
    DATA = 1
    ZERO = 2
    SAME = 3
    END = 4  # offset: the stripe's size
    HAVE = 16  # value: the receiver has so many bytes, go on from there
    DONE = 17  # value: the stripe's size; all is verified and stored
    TROUBLE = 18  # value: 1 when another connection may help; text: code and message


class Trouble(Exception):
    """An error of the taxonomy, by its code: the classes themselves would bring gRPC into every child."""

    def __init__(self, code: str, message: str, *, again: bool = False) -> None:
        """`again`: another connection may help."""
        super().__init__(message)
        self.code, self.message, self.again = code, message, again


@dataclass(frozen=True, slots=True)
class Record:
    kind: Kind
    length: int
    offset: int
    twin: int = 0
    digest: bytes = bytes(DIGEST_BYTES)

    def header(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.kind, self.length, self.offset, self.twin, self.digest)
        return fields + xxhash.xxh3_64_digest(fields)


def parse_header(header: bytes | bytearray | memoryview, have_bytes: int) -> Record:
    """The record that continues a stripe of which `have_bytes` are here."""
    fields = bytes(header[: _FIELDS.size])
    magic, kind, length, offset, twin, digest = _FIELDS.unpack(fields)
    if xxhash.xxh3_64_digest(fields) != bytes(header[_FIELDS.size :]) or magic != _MAGIC:
        raise Trouble("damaged", f"the record at {have_bytes} does not begin like one", again=True)
    if kind not in (Kind.DATA, Kind.ZERO, Kind.SAME, Kind.END):
        raise Trouble("damaged", f"a record of kind {kind} at {have_bytes}")
    if offset != have_bytes:
        raise Trouble("damaged", f"a {Kind(kind).name} record for {offset} where {have_bytes} bytes have arrived")
    if kind == Kind.END:
        if length:
            raise Trouble("damaged", f"an END of {length} bytes")
    elif not 0 < length <= MAX_RECORD_BYTES or offset + length > MAX_STRIPE_BYTES:
        raise Trouble("damaged", f"a record of {length} bytes at {offset}; at most {MAX_RECORD_BYTES} are allowed")
    if kind == Kind.SAME and twin + length > have_bytes:
        raise Trouble("damaged", f"the record at {offset} repeats {twin}, where nothing is yet")
    return Record(Kind(kind), length, offset, twin, digest)


def digest_of(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


@functools.lru_cache(maxsize=4)
def digest_of_zeros(length: int) -> bytes:
    return digest_of(bytes(length))


# ---------------------------------------------------------------- replies


def reply(kind: Kind, value: int, text_bytes: int = 0) -> bytes:
    return _REPLY.pack(_MAGIC, kind, value, text_bytes)


def trouble_reply(trouble: Trouble) -> tuple[bytes, bytes]:
    """(reply, the text that follows)."""
    message = trouble.message[: MAX_TEXT_BYTES // 8]  # JSON may take six bytes for one
    text = json.dumps({"code": trouble.code, "message": message}).encode()
    return reply(Kind.TROUBLE, trouble.again, len(text)), text


def parse_reply(header: bytes) -> tuple[Kind, int, int]:
    """(kind, value, bytes of text that follow)."""
    magic, kind, value, text_bytes = _REPLY.unpack(header)
    if magic != _MAGIC or kind not in (Kind.HAVE, Kind.DONE, Kind.TROUBLE) or text_bytes > MAX_TEXT_BYTES:
        raise Trouble("damaged", f"the target's reply makes no sense: {header!r}", again=True)
    return Kind(kind), value, text_bytes


def parse_trouble(value: int, text: bytes) -> Trouble:
    try:
        fields: dict[str, Any] = json.loads(text)
        return Trouble(str(fields["code"]), str(fields["message"]), again=bool(value))
    except (ValueError, KeyError, TypeError):
        return Trouble("damaged", f"the target's trouble makes no sense: {text[:200]!r}")


# ---------------------------------------------------------------- memory for the largest record


def memory(count_bytes: int) -> mmap.mmap:
    """Its pages come when they are used, and most records are far smaller than the largest. Private: not tmpfs."""
    return mmap.mmap(-1, count_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer:
    """Memory for a record's payload, compared by the C library."""

    def __init__(self) -> None:
        self._memory = memory(MAX_RECORD_BYTES)
        self.payload = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def equals(self, other: Buffer, length: int) -> bool:
        """Looks no further than the first difference."""
        return int(_memcmp(self._address, other._address, length)) == 0


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int
