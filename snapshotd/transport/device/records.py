"""What a stripe's connection carries: records one way, a few replies the other. For the children, so nothing heavy here.

A record is a header and, with DATA, its payload. The records of a stripe are in order and without gaps: what the receiver
has is always a prefix of the sender's. Zeros are sent as a length, a repetition as the offset of its earlier copy.

Invariant: the header has its own checksum, the digest is that of the record's bytes however they travel, and both are
verified before they count as stored. On an encrypted connection (sealed.py) the tag replaces the digest of DATA. Malformed
input raises `StripeError` before anything is allocated for it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from snapshotd.transport.sealed import memory

#: So much fits the cache of a core, where it is digested and encrypted, or decrypted and stored.
RECORD_BYTES = 512 << 10
MAX_RECORD_BYTES = 8 << 20
MAX_STRIPE_BYTES = 1 << 40
DIGEST_BYTES = 16

_MAGIC = b"SNST"
#: magic, kind, length, offset, offset of the earlier copy, digest; the header's checksum follows.
_FIELDS = struct.Struct(">4sBxxxIQQ16s")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
#: magic, kind, value, length of the text that follows.
_REPLY = struct.Struct(">4sBxxxQI")
REPLY_BYTES = _REPLY.size
MAX_TEXT_BYTES = 8 << 10


class Kind(IntEnum):
    DATA = 1
    ZERO = 2
    SAME = 3
    END = 4  # offset: the stripe's size
    HAVE = 16  # value: bytes that the receiver has; the sender continues there
    DONE = 17  # value: the stripe's size; all of it is verified and stored
    ERROR = 18  # value: 1 if a new connection may help; text: code and message


class StripeError(Exception):
    """An error of the taxonomy, by its code: the classes themselves would import gRPC into every child."""

    def __init__(self, code: str, message: str, *, retry: bool = False) -> None:
        """`retry`: a new connection may help."""
        super().__init__(message)
        self.code, self.message, self.retry = code, message, retry


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
    """The record that continues a stripe of which `have_bytes` have arrived."""
    fields = bytes(header[: _FIELDS.size])
    magic, kind, length, offset, twin, digest = _FIELDS.unpack(fields)
    if xxhash.xxh3_64_digest(fields) != bytes(header[_FIELDS.size :]) or magic != _MAGIC:
        raise StripeError("damaged", f"the record at {have_bytes} has a damaged header", retry=True)
    if kind not in (Kind.DATA, Kind.ZERO, Kind.SAME, Kind.END):
        raise StripeError("damaged", f"a record of kind {kind} at {have_bytes}")
    if offset != have_bytes:
        raise StripeError("damaged", f"a {Kind(kind).name} record for {offset} where {have_bytes} bytes have arrived")
    if kind == Kind.END:
        if length:
            raise StripeError("damaged", f"an END of {length} bytes")
    elif not 0 < length <= MAX_RECORD_BYTES or offset + length > MAX_STRIPE_BYTES:
        raise StripeError("damaged", f"a record of {length} bytes at {offset}; at most {MAX_RECORD_BYTES} are allowed")
    if kind == Kind.SAME and twin + length > have_bytes:
        raise StripeError("damaged", f"the record at {offset} repeats {twin}, which has not arrived yet")
    return Record(Kind(kind), length, offset, twin, digest)


def digest_of(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


@functools.lru_cache(maxsize=4)
def digest_of_zeros(length: int) -> bytes:
    return digest_of(bytes(length))


# ---------------------------------------------------------------- replies


def reply(kind: Kind, value: int, text_bytes: int = 0) -> bytes:
    return _REPLY.pack(_MAGIC, kind, value, text_bytes)


def error_reply(error: StripeError) -> tuple[bytes, bytes]:
    """(reply, the text that follows)."""
    message = error.message[: MAX_TEXT_BYTES // 8]  # JSON may need six bytes for a character
    text = json.dumps({"code": error.code, "message": message}).encode()
    return reply(Kind.ERROR, error.retry, len(text)), text


def parse_reply(header: bytes) -> tuple[Kind, int, int]:
    """(kind, value, bytes of text that follow)."""
    magic, kind, value, text_bytes = _REPLY.unpack(header)
    if magic != _MAGIC or kind not in (Kind.HAVE, Kind.DONE, Kind.ERROR) or text_bytes > MAX_TEXT_BYTES:
        raise StripeError("damaged", f"the target sent an invalid reply: {header!r}", retry=True)
    return Kind(kind), value, text_bytes


def parse_error(value: int, text: bytes) -> StripeError:
    try:
        fields: dict[str, Any] = json.loads(text)
        return StripeError(str(fields["code"]), str(fields["message"]), retry=bool(value))
    except (ValueError, KeyError, TypeError, RecursionError):
        return StripeError("damaged", f"the target sent an invalid error: {text[:200]!r}")


# ---------------------------------------------------------------- memory for the largest record


class Buffer:
    """Memory for a record's payload. Most records are far smaller than the largest."""

    def __init__(self) -> None:
        self.payload = memoryview(memory(MAX_RECORD_BYTES))


def equal(one: memoryview, other: memoryview) -> bool:
    """Whether two parts of writable memory have the same bytes. Stops at the first difference, unlike `==`, which unpacks."""
    return len(one) == len(other) and not _memcmp(_address(one), _address(other), len(one))


def _address(part: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int
