"""A child's connection: taken over from its daemon, sealed where that is wanted, read to the last byte asked for.

The daemon has opened it, tuned it (images/wire.py), seen that the other end holds the lane's key, and derived the keys
of this one connection (key.py), which come with the descriptor. Not wire.py's own functions, because that file brings
gRPC along, most of what a child would weigh.

What travels is a row of messages whose lengths both ends know before they read: a record's header, its payload, a
reply, its text. Sealed, each is AES-256-GCM with a tag behind it. Both directions have a key of their own, and the
nonce is the number of the message.

Invariant: no nonce is used twice with a key, because no other connection ever has that key and a number is spent before
it is used. So a message that passes is the one that was sent in this place of this connection: changed, left out,
repeated, moved, sent back or taken from another connection it fails, and everything behind it. An end is not a message:
one that a stranger made is a broken connection and never the end of a stripe, which END and DONE alone are. Headers are
sealed as well: they are believed before the payload is here, and their digests would tell of the content.

It hides neither lengths nor times, so who watches may count zeros and repetitions; nor does TLS. Instead of TLS because
Python's hands over 16 KiB per call; a record of a megabyte costs one. A stripe of 2**40 bytes stays far below what one
key of AES-GCM may seal.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from snapshotd.transport.device.handover import Keys
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    REPLY_BYTES,
    Kind,
    Trouble,
    memory,
    parse_reply,
    parse_trouble,
)

#: How long the other end may take for its first word.
CONNECT_S = 3.0
TAG_BYTES = 16
_NONCE_BYTES = 12

Bytes = bytes | bytearray | memoryview


class Connection:
    """As it is: the records' own digests are all that verifies what arrives."""

    #: What arrives is what was sent, whoever is on the way.
    sealed = False

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def send(self, *messages: Bytes) -> None:
        """In one call, where the kernel takes them all."""
        sent = self._socket.sendmsg(messages)
        for message in messages:
            if sent < len(message):
                self._socket.sendall(memoryview(message)[sent:])
            sent = max(0, sent - len(message))

    def read_into(self, view: memoryview) -> None:
        """The next message, which fills `view`. An end without a word is a ConnectionError."""
        self._fill(view)

    def skip(self, scratch: memoryview) -> bool:
        """Whatever comes next is forgotten; False: the other end has hung up."""
        return bool(self._socket.recv_into(scratch))

    def hang_up(self) -> None:
        """Under the hands of the thread that reads it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the connection ended without a word")
            done += count


class SealedConnection(Connection):
    sealed = True

    def __init__(self, connected: socket.socket, keys: Keys) -> None:
        super().__init__(connected)
        self._seals, self._opens = AESGCM(keys.sends), AESGCM(keys.reads)
        self._sent = self._read = 0
        self._out = memoryview(memory(HEADER_BYTES + MAX_RECORD_BYTES + 2 * TAG_BYTES))
        self._in = memoryview(memory(MAX_RECORD_BYTES + TAG_BYTES))

    def send(self, *messages: Bytes) -> None:
        end = 0
        for message in messages:
            begin, end = end, end + len(message) + TAG_BYTES
            number, self._sent = self._sent, self._sent + 1
            self._seals.encrypt_into(_nonce(number), message, None, self._out[begin:end])
        self._socket.sendall(self._out[:end])

    def read_into(self, view: memoryview) -> None:
        """Trouble where the seal is broken; what `view` has then is nothing."""
        arrived = self._in[: len(view) + TAG_BYTES]
        self._fill(arrived)
        number, self._read = self._read, self._read + 1
        try:
            self._opens.decrypt_into(_nonce(number), arrived, None, view)
        except InvalidTag as error:
            raise Trouble(
                "damaged", f"message {number} of the connection arrived with a broken seal", again=True
            ) from error


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


def taken_over(fd: int, message: dict[str, Any]) -> Connection:
    """The connection that the daemon hands over with `message`."""
    connected = socket.socket(fileno=fd)
    keys = Keys.of(message)
    return Connection(connected) if keys is None else SealedConnection(connected, keys)


def read_reply(connection: Connection) -> tuple[Kind, int]:
    """HAVE or DONE and its value; TROUBLE is raised."""
    kind, value, text_bytes = parse_reply(_read(connection, REPLY_BYTES))
    text = _read(connection, text_bytes) if text_bytes else b""
    if kind is Kind.TROUBLE:
        raise parse_trouble(value, text)
    return kind, value


def _read(connection: Connection, count_bytes: int) -> bytes:
    blob = bytearray(count_bytes)
    connection.read_into(memoryview(blob))
    return bytes(blob)
