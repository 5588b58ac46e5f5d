"""A child's connection: received from its daemon, encrypted where wanted, read to the last byte asked for.

The daemon has opened it, set its socket options (sockets.py), authenticated the peer, and derived the keys of this one
connection (authentication.py), which come with the descriptor.

A connection carries messages whose lengths both sides know before they read: a record's header, its payload, a reply, its
text. Encrypted, each is AES-256-GCM followed by its tag. Each direction has its own key, and the nonce is the number of
the message.

Invariant: no nonce is used twice with a key, because no other connection ever has that key and each number is used once. So a
message that passes is the one that was sent at this position of this connection. One that was changed, left out, repeated,
moved, reflected or taken from another connection fails, and so does everything after it. End of file is not a message: an
attacker can cause it, so it is a broken connection and never the end of a stripe, which only END and DONE are. Headers are
encrypted as well: they are used before the payload has arrived, and their digests would reveal the content.

Lengths and times are visible, so an observer may count zeros and repetitions; TLS does not hide them either. TLS was rejected
because Python returns 16 KiB per call, whereas a record of a megabyte costs one call here. A stripe of 2**40 bytes stays
far below what one AES-GCM key may encrypt.
"""

from __future__ import annotations

import socket
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from snapshotd.transport.device.keys import Keys
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    REPLY_BYTES,
    Kind,
    StripeError,
    memory,
    parse_error,
    parse_reply,
)
from snapshotd.transport.sockets import drain, fill, hang_up

TAG_BYTES = 16
_NONCE_BYTES = 12

Bytes = bytes | bytearray | memoryview


class Connection:
    """Not encrypted: only the records' digests verify what arrives."""

    #: Whether messages are authenticated: what arrives is then what was sent.
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
        """In one system call, if the kernel takes all of them."""
        sent = self._socket.sendmsg(messages)
        for message in messages:
            if sent < len(message):
                self._socket.sendall(memoryview(message)[sent:])
            sent = max(0, sent - len(message))

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next message. ConnectionError if the connection ends before."""
        fill(self._socket, view, socket.MSG_WAITALL)

    def drain(self, limit_s: float) -> None:
        """Lets the peer read the last message and close first."""
        drain(self._socket, limit_s)

    def hang_up(self) -> None:
        """Ends it while another thread is reading it."""
        hang_up(self._socket)


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
        """StripeError if authentication fails; the content of `view` is then meaningless."""
        arrived = self._in[: len(view) + TAG_BYTES]
        fill(self._socket, arrived, socket.MSG_WAITALL)
        number, self._read = self._read, self._read + 1
        try:
            self._opens.decrypt_into(_nonce(number), arrived, None, view)
        except InvalidTag as error:
            raise StripeError(
                "damaged", f"message {number} of the connection failed authentication", retry=True
            ) from error


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


def taken_over(fd: int, message: dict[str, Any]) -> Connection:
    """The connection that the daemon passes with `message`."""
    connected = socket.socket(fileno=fd)
    keys = Keys.of(message)
    return Connection(connected) if keys is None else SealedConnection(connected, keys)


def read_reply(connection: Connection) -> tuple[Kind, int]:
    """HAVE or DONE and its value. ERROR is raised."""
    kind, value, text_bytes = parse_reply(_read(connection, REPLY_BYTES))
    text = _read(connection, text_bytes) if text_bytes else b""
    if kind is Kind.ERROR:
        raise parse_error(value, text)
    return kind, value


def _read(connection: Connection, count_bytes: int) -> bytes:
    blob = bytearray(count_bytes)
    connection.read_into(memoryview(blob))
    return bytes(blob)
