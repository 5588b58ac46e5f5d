"""Encodes and decodes the frames that keepers and daemons exchange. No I/O; standard library only.

    u32 length of the rest (big-endian) | u16 header length | JSON header, an object with a "t" | raw payload

Invariant: whatever bytes arrive, `Decoder.feed` yields whole frames or raises `FrameError`; it never buffers more than
one frame. The daemons forward relay frames without reading the payload, so only the types in `RELAY_TYPES` may cross
from one node to another: a remote daemon cannot send control frames to a keeper.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

#: The version of the frames between keepers and daemons, and between the keepers of a rank; every hello names it. A field or
#: frame that the other side may ignore does not change it. A keeper runs as long as its rank, so a daemon meets older ones:
#: it serves those from OLDEST_PROTOCOL on.
PROTOCOL, OLDEST_PROTOCOL = 1, 1

MAX_PAYLOAD_BYTES = 1 << 20
MAX_HEADER_BYTES = (1 << 16) - 1
MAX_FRAME_BYTES = 2 + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
MAX_HELLO_BYTES = 2 + MAX_HEADER_BYTES  # a hello has no payload

#: guest keeper <-> home keeper, through both daemons. relay.py lists what each carries.
RELAY_TYPES = frozenset(
    {"sync", "resync", "out", "ack", "shut", "in", "inack", "sig", "sigack", "win", "exit", "exitack"}
)

_LENGTH = struct.Struct("!I")
_HEADER_LENGTH = struct.Struct("!H")

Header = dict[str, Any]


class FrameError(ValueError):
    """Bytes that are not a frame, or a frame that is too large. Their connection must not be used any more."""


class Frame(NamedTuple):
    """One decoded frame. `header` always has a string under "t"."""

    header: Header
    payload: bytes

    @property
    def type(self) -> str:
        return str(self.header["t"])

    def encoded(self) -> bytes:
        return _join(self.header, self.payload)


def encode(frame_type: str, fields: Header | None = None, payload: bytes = b"") -> bytes:
    """One frame as bytes, ready to be written."""
    return _join({"t": frame_type, **(fields or {})}, payload)


def _join(header: Header, payload: bytes) -> bytes:
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MAX_HEADER_BYTES:
        raise FrameError(f"a frame's header of {len(head)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a frame's payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    rest_bytes = _HEADER_LENGTH.size + len(head) + len(payload)
    return b"".join((_LENGTH.pack(rest_bytes), _HEADER_LENGTH.pack(len(head)), head, payload))


def decode(frame: bytes) -> Frame:
    """Decodes the bytes of exactly one frame, as one message between daemons carries them."""
    decoder = Decoder()
    found = list(decoder.feed(frame))
    if len(found) != 1 or decoder.pending_bytes:
        raise FrameError(f"{len(frame)} bytes are not exactly one frame")
    return found[0]


class Decoder:
    """Splits a byte stream, which arrives in arbitrary pieces, into frames of at most `max_frame_bytes`."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes. Raises FrameError at the first bytes that cannot be a frame."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (rest_bytes,) = _LENGTH.unpack_from(self._buffer)
            if not _HEADER_LENGTH.size <= rest_bytes <= self.max_frame_bytes:
                raise FrameError(f"a frame of {rest_bytes} bytes is impossible or over the limit")
            if len(self._buffer) < _LENGTH.size + rest_bytes:
                return
            rest = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + rest_bytes])
            del self._buffer[: _LENGTH.size + rest_bytes]
            yield _parse(rest)


def _parse(rest: bytes) -> Frame:
    (head_bytes,) = _HEADER_LENGTH.unpack_from(rest)
    payload_at = _HEADER_LENGTH.size + head_bytes
    if payload_at > len(rest):
        raise FrameError("a frame's header is longer than the frame")
    if len(rest) - payload_at > MAX_PAYLOAD_BYTES:
        raise FrameError("a frame's payload is over the limit")
    try:
        header = json.loads(rest[_HEADER_LENGTH.size : payload_at], parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("t"), str):
        raise FrameError("a frame's header is not an object with a type")
    return Frame(header, rest[payload_at:])


def _finite(text: str) -> float:
    """Infinity and NaN are no JSON, though Python reads them; what would convert them to an integer does not expect that."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
