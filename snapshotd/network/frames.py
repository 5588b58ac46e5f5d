"""What the daemon and its network process send each other: a length, then one of these structs as msgpack.

Invariant: each side accepts only what the other one may send, with every field of its type and within its limits. Anything
else is a Violation and closes the link. The daemon (root) treats what the network process sends as hostile.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from snapshotd.api.calls import MAX_MESSAGE_BYTES

#: The largest frame: a message and the few bytes around it.
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1024
LENGTH = struct.Struct("!I")

#: The metadata of calls that servicers need; other metadata is not passed on.
METADATA_KEYS = frozenset({"move", "rank-uid", "relay-key", "relay-next", "coordinator"})
#: Not in the .proto: the network process asks for the text that it serves as metrics.
METRICS = "/metrics"

Number = Annotated[int, Meta(gt=0, lt=1 << 62)]
Path = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(max_length=1024)]
Metadata = Annotated[list[tuple[Name, Name]], Meta(max_length=8)]
_Pem = Annotated[bytes, Meta(max_length=1 << 20)]


class Violation(Exception):
    """The peer sent what it must not send."""


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Not changed once it is made."""


# ---------------------------------------------------------------- calls, in either direction; `call` numbers are unique


class Data(Frame, tag=1):
    call: Number
    body: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class Done(Frame, tag=2):
    """The caller sends no more messages."""

    call: Number


class End(Frame, tag=3):
    """The callee ends the call with a gRPC status; `error` is the wire form of an error of the taxonomy."""

    call: Number
    status: Annotated[str, Meta(pattern=r"^[A-Z_]{2,32}\Z")]
    details: Annotated[str, Meta(max_length=1 << 16)] = ""
    error: Annotated[bytes, Meta(max_length=1 << 17)] = b""


class Cancel(Frame, tag=4):
    """The caller gives the call up."""

    call: Number


class Credit(Frame, tag=5):
    """The receiver has used messages of this cost (link.py), so that as much may follow."""

    call: Number
    cost: Annotated[int, Meta(gt=0, le=MAX_FRAME_BYTES)]


class Ping(Frame, tag=6):
    pass


class Pong(Frame, tag=7):
    pass


# ---------------------------------------------------------------- from the network process to the daemon


class Request(Frame, tag=16):
    """Opens a call from outside. The network process states the caller's role: it has checked the certificate."""

    call: Number
    method: Path
    role: Literal["operator", "node", "root"]
    name: Name
    metadata: Metadata


class Listening(Frame, tag=17):
    """It listens everywhere. `port` is that of `listen`, useful with 0."""

    port: Annotated[int, Meta(ge=0, le=65535)]


class NotListening(Frame, tag=18):
    """It cannot listen; the wire form of the error. The process ends."""

    error: Annotated[bytes, Meta(max_length=1 << 17)]


# ---------------------------------------------------------------- from the daemon to the network process


class Settings(Frame, tag=32):
    """The first frame. An empty address means: not there."""

    listen: str
    admin_socket: str
    metrics_listen: str


class Files(Frame, tag=33):
    """The certificates for new connections, and the serial numbers that are revoked, in hexadecimal."""

    ca: _Pem
    cert: _Pem
    key: _Pem
    revoked: list[str]


class Dial(Frame, tag=34):
    """Opens a call to another daemon over the connection `channel`, which is established if there is none yet."""

    call: Number
    channel: Number
    endpoint: str
    node: str
    method: str
    metadata: Metadata
    timeout_s: float | None


class Close(Frame, tag=35):
    """Closes the connection `channel`."""

    channel: Number


class Stop(Frame, tag=36):
    """Stops listening, lets open calls end within `grace_s`, then ends the process."""

    grace_s: float


_CALLS = Data | Done | End | Cancel | Credit | Ping | Pong
FROM_NETWORK = msgspec.msgpack.Decoder(_CALLS | Request | Listening | NotListening)
FROM_DAEMON = msgspec.msgpack.Decoder(_CALLS | Settings | Files | Dial | Close | Stop)

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """The frame with its length. Raises ValueError for one that the peer would refuse for its size."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is larger than {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def decode(decoder: msgspec.msgpack.Decoder[Frame], body: bytes) -> Frame:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Violation(f"a malformed frame: {error}") from error
