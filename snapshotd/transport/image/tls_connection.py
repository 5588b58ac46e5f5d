"""A plain connection as the bulk lane wants it: TLS 1.3, large buffers, and messages with their length before them.

gRPC's own framing, flow control and copies cost more than the encryption: on a machine with cores to spare they, and not
the network, were the limit. Here a thread per connection reads and writes large buffers, outside the interpreter's lock.

Invariant: whoever is at the other end holds a certificate of the cluster's CA, and a peer that went silent is noticed
within about ten seconds (both as in api/channel.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from time import monotonic

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.transport.image.frame import Frame

#: How long the other end may take to connect, and to show who it is.
CONNECT_S = 3.0
_LENGTH = struct.Struct(">I")
_END = 0xFFFF_FFFF  # instead of a length: no more messages this way
_BUFFER_BYTES = 4 << 20
_DRAIN_BYTES = 64 << 10
_SILENT_MS = 10_000
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # <asm-generic/socket.h>; Python has no name for them


def tls_context(credentials: Credentials, *, server_side: bool) -> ssl.SSLContext:
    """Both ends show a certificate of the same CA. BadConfig if the files are no good.

    The cipher is OpenSSL's choice (AES-256-GCM): this Python cannot choose among those of TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # nobody resumes, and a ticket would look like an answer
    try:
        context.load_cert_chain(credentials.cert, credentials.key)
        context.load_verify_locations(credentials.ca)
    except OSError as error:  # ssl.SSLError is one
        raise BadConfig(f"{credentials.cert}, {credentials.key} or {credentials.ca} cannot be used: {error}") from error
    return context


def tune(endpoint: socket.socket) -> None:
    """Buffers that hold a chunk on its way, no waiting for more to send, and an end to silence. A listener's are inherited.

    The plain SO_RCVBUF is cut to net.core.rmem_max, often 200 KiB, and stops the kernel from doing better by itself.
    """
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        with contextlib.suppress(PermissionError):  # not root: the kernel's own choice grows as needed
            endpoint.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, _SILENT_MS),
    ):
        endpoint.setsockopt(socket.IPPROTO_TCP, option, value)


def hang_up(connection: socket.socket) -> None:
    """Ends a connection under the hands of the thread that reads or writes it; that thread gets an OSError or the end.

    Not SSLSocket.shutdown: it takes the encryption off a socket that another thread is using.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def drain(connection: socket.socket, patience_s: float) -> None:
    """Says nothing more, and takes whatever still comes until the other end hangs up, for so long at most.

    A connection that is closed with bytes unread is reset, and the reset overtakes the last words: the other end would hear
    that the connection broke, and not why. Plain bytes, also where TLS has failed.
    """
    ends_s = monotonic() + patience_s
    with contextlib.suppress(OSError):  # TimeoutError is one
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left_s := ends_s - monotonic()) > 0:
            connection.settimeout(left_s)
            if not socket.socket.recv(connection, _DRAIN_BYTES):
                break


def send_message(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def send_end(connection: socket.socket) -> None:
    connection.sendall(_LENGTH.pack(_END))


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Header and payload, two messages; the payload goes from where it is."""
    header = frame.header()
    head = _LENGTH.pack(len(header)) + header
    if not frame.payload_bytes:
        connection.sendall(head)
        return
    connection.sendall(head + _LENGTH.pack(len(frame.payload)))
    connection.sendall(frame.payload)


class Inlet:
    """The messages that come in over a connection. An end without a word is a ConnectionError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._length = memoryview(bytearray(_LENGTH.size))
        self._unread_bytes = 0
        self._scrap = memoryview(bytearray(64 << 10))

    def next_bytes(self) -> int | None:
        """The length of the next message, None if there will be none. What was not read of the last one is skipped."""
        while self._unread_bytes:
            self.read_into(self._scrap[: min(self._unread_bytes, len(self._scrap))])
        self._fill(self._length)
        (length,) = _LENGTH.unpack(self._length)
        if length == _END:
            return None
        self._unread_bytes = length
        return int(length)

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes of the message."""
        self._unread_bytes -= len(view)
        self._fill(view)

    def read(self, count_bytes: int) -> bytes:
        blob = bytearray(count_bytes)
        self.read_into(memoryview(blob))
        return bytes(blob)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):  # TLS hands over a record at a time, 16 KiB at most
            count = self._connection.recv_into(view[done:])
            if not count:
                raise ConnectionResetError("the connection ended without a word")
            done += count
