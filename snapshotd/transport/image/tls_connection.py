"""A bulk connection's encoding: TLS 1.3, and messages preceded by their length.

gRPC's framing, flow control and copies cost more than the encryption: on a machine with idle cores they were the limit, not
the network. Here one thread per connection reads and writes large buffers, outside the interpreter's lock.

Invariant: the peer holds a certificate of the cluster's CA that was not revoked.
"""

from __future__ import annotations

import socket
import ssl
import struct

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Denied
from snapshotd.api.revocation import peer_of, revocations_of
from snapshotd.transport.image.frame import Frame
from snapshotd.transport.sockets import fill

_LENGTH = struct.Struct(">I")
_END = 0xFFFF_FFFF  # instead of a length: the last message has been sent
_SKIP_BYTES = 64 << 10


def tls_context(credentials: Credentials, *, server_side: bool) -> ssl.SSLContext:
    """Both sides must present a certificate of the same CA. BadConfig if the files cannot be used.

    OpenSSL chooses the cipher (AES-256-GCM): this Python cannot choose among those of TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # sessions are never resumed, and the sender's poll would take a ticket for an answer
    try:
        context.load_cert_chain(credentials.cert, credentials.key)
        context.load_verify_locations(credentials.ca)
    except OSError as error:  # includes ssl.SSLError
        raise BadConfig(f"{credentials.cert}, {credentials.key} or {credentials.ca} cannot be used: {error}") from error
    return context


def peer_node(connection: ssl.SSLSocket, credentials: Credentials) -> str:
    """The common name of the peer's certificate. Raises Denied if it has not exactly one, or was revoked."""
    peer = peer_of(ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode())
    if len(peer.common_names) != 1:
        raise Denied(f"the peer's certificate has {len(peer.common_names)} common names: {peer.common_names!r}")
    if revocations_of(credentials.ca).revoked(peer.serial):
        raise Denied(f"the certificate of {peer.common_names[0]} with serial number {peer.serial:x} has been revoked")
    return peer.common_names[0]


def send_message(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def send_end(connection: socket.socket) -> None:
    connection.sendall(_LENGTH.pack(_END))


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Header and payload as two messages. The payload is sent from where it lies, without a copy."""
    header = frame.header()
    head = _LENGTH.pack(len(header)) + header
    if not frame.payload_bytes:
        connection.sendall(head)
        return
    connection.sendall(head + _LENGTH.pack(len(frame.payload)))
    connection.sendall(frame.payload)


class MessageReader:
    """Reads the messages that arrive over a connection. ConnectionError if it ends without `send_end`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._length = memoryview(bytearray(_LENGTH.size))
        self._unread_bytes = 0
        self._ended = False
        self._skipped = memoryview(bytearray(_SKIP_BYTES))

    def next_bytes(self) -> int | None:
        """The length of the next message, None after the last one. The unread rest of the previous one is skipped."""
        if self._ended:
            return None
        while self._unread_bytes:
            self.read_into(self._skipped[: min(self._unread_bytes, len(self._skipped))])
        fill(self._connection, self._length)
        (length,) = _LENGTH.unpack(self._length)
        if length == _END:
            self._ended = True
            return None
        self._unread_bytes = length
        return int(length)

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes of the message."""
        self._unread_bytes -= len(view)
        fill(self._connection, view)

    def read(self, count_bytes: int) -> bytes:
        blob = bytearray(count_bytes)
        self.read_into(memoryview(blob))
        return bytes(blob)
