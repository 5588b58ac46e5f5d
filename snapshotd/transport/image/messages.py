"""The messages of a bulk connection: each is preceded by its length, which is a message of its own (sealed.py)."""

from __future__ import annotations

import struct

from snapshotd.transport.image.frame import Frame
from snapshotd.transport.sealed import Bytes, Connection

_LENGTH = struct.Struct(">I")
_END = 0xFFFF_FFFF  # instead of a length: the last message has been sent


def send_message(connection: Connection, message: Bytes) -> None:
    connection.send(*_preceded(message))


def send_end(connection: Connection) -> None:
    connection.send(_LENGTH.pack(_END))


def send_frame(connection: Connection, frame: Frame) -> None:
    """Header and payload, in one system call if the kernel takes all of it."""
    header = _preceded(frame.header())
    connection.send(*header, *(_preceded(frame.payload) if frame.payload_bytes else ()))


def next_bytes(connection: Connection) -> int | None:
    """The length of the next message, which the caller has to read as a whole; None after the last one."""
    (length,) = _LENGTH.unpack(connection.read(_LENGTH.size))
    return None if length == _END else int(length)


def _preceded(message: Bytes) -> tuple[Bytes, Bytes]:
    return _LENGTH.pack(len(message)), message
