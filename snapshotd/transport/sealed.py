"""A connection of a data channel: messages, encrypted where wanted. Both channels use it, so nothing heavy here.

Before that, the socket options were set (sockets.py), the peer was authenticated, and the keys of this connection were agreed
(handshake.py).

A connection carries messages whose lengths both sides know before they read: a record's header, its payload, a reply, the
length of the next message. Encrypted, each is AES-256-GCM followed by its tag. Each direction has its own key, and the nonce
is the number of the message.

Invariant: no nonce is used twice with a key, because no other connection ever has that key and each number is used once. So a
message that passes is the one that was sent at this position of this connection. One that was changed, left out, repeated,
moved, reflected or taken from another connection fails, and so does everything after it. End of file is not a message: an
attacker can cause it, so it is a broken connection and never the end of what is sent. Headers are encrypted as well: they are
used before the payload has arrived, and their digests would reveal the content.

Lengths and times are visible, so an observer may count zeros and repetitions; TLS does not hide them either. TLS for the data
itself was rejected because Python passes 16 KiB in a call, whereas a message of megabytes costs one call here, outside the
interpreter's lock. 2**40 bytes in megabytes stay far below what one AES-GCM key may encrypt.
"""

from __future__ import annotations

import mmap
import socket

from snapshotd.transport.keys import Keys
from snapshotd.transport.sockets import drain, fill, hang_up

TAG_BYTES = 16
_NONCE_BYTES = 12

Bytes = bytes | bytearray | memoryview


class Unauthentic(Exception):
    """A message that the peer did not send, at least not at this position of this connection."""


class Connection:
    """Not encrypted: only digests verify what arrives."""

    #: Whether messages are authenticated: what arrives is then what was sent.
    sealed = False

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
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

    def read(self, count_bytes: int) -> bytes:
        """The next message, which has so many bytes."""
        blob = bytearray(count_bytes)
        self.read_into(memoryview(blob))
        return bytes(blob)

    def drain(self, limit_s: float) -> None:
        """Lets the peer read the last message and close first."""
        drain(self._socket, limit_s)

    def hang_up(self) -> None:
        """Ends it while another thread is reading it."""
        hang_up(self._socket)


class SealedConnection(Connection):
    sealed = True

    def __init__(self, connected: socket.socket, keys: Keys) -> None:
        # Not at the top: an idle daemon has no connection, and `cryptography` takes 10 MiB of its memory.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(connected)
        self._seals, self._opens, self._invalid = AESGCM(keys.sends), AESGCM(keys.reads), InvalidTag
        self._sent = self._read = 0
        self._out = self._in = memoryview(b"")

    def send(self, *messages: Bytes) -> None:
        self._out = _at_least(self._out, sum(map(len, messages)) + TAG_BYTES * len(messages))
        end = 0
        for message in messages:
            begin, end = end, end + len(message) + TAG_BYTES
            number, self._sent = self._sent, self._sent + 1
            self._seals.encrypt_into(_nonce(number), message, None, self._out[begin:end])
        self._socket.sendall(self._out[:end])

    def read_into(self, view: memoryview) -> None:
        """Unauthentic if authentication fails; the content of `view` is then meaningless."""
        self._in = _at_least(self._in, len(view) + TAG_BYTES)
        arrived = self._in[: len(view) + TAG_BYTES]
        fill(self._socket, arrived, socket.MSG_WAITALL)
        number, self._read = self._read, self._read + 1
        try:
            self._opens.decrypt_into(_nonce(number), arrived, None, view)
        except self._invalid as error:
            raise Unauthentic(f"message {number} of the connection failed authentication") from error


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


def _at_least(buffer: memoryview, count_bytes: int) -> memoryview:
    """The buffer, or a larger one. The largest message of a connection decides how much memory it needs."""
    return buffer if len(buffer) >= count_bytes else memoryview(memory(count_bytes))


def memory(count_bytes: int) -> mmap.mmap:
    """Pages are allocated on first use. Private, so not tmpfs."""
    return mmap.mmap(-1, count_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
