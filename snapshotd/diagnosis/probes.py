"""Connections that only show that they arrive: a free port as the data channels of a move have it, tried before a move.

Both directions carry more than a packet of the largest usual MTU, so that a path that loses large packets is noticed.

Invariant: nothing that arrives is interpreted. A connection without the key, which only other nodes get over mutual TLS, is
closed. There is at most one port at each address for data, open for OPEN_S after it was last asked for.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.transport.listener import KEY_BYTES, MoveListener
from snapshotd.transport.routes import Route

OPEN_S = 30.0
#: Asked for again before it closes, so that a caller has time to connect.
_FRESH_S = 15.0
#: For the peer to send what it has to send.
CONNECT_S = 60.0
#: More than one packet with jumbo frames (9,000 bytes).
PAYLOAD_BYTES = 32 << 10
_PENDING = 256


class Probes:
    """The port of this node. Every method may block, and may be called from any thread."""

    def __init__(self, hosts: Sequence[str], data_addresses: Sequence[str] = ()) -> None:
        self._hosts, self._data_addresses = hosts, data_addresses
        self._lock = threading.Lock()
        self._listener: MoveListener | None = None
        self._key, self._opened_s = b"", 0.0

    def open(self) -> pb.OpenProbeReply:
        with self._lock:
            if self._listener is None or time.monotonic() > self._opened_s + _FRESH_S or not self._listener.accepting:
                key = os.urandom(KEY_BYTES)

                def serve(connection: socket.socket) -> None:
                    _answer(connection, key)

                listener = MoveListener(
                    "probe",
                    self._hosts,
                    serve,
                    data_addresses=self._data_addresses,
                    max_pending=_PENDING,
                    open_s=OPEN_S,
                )
                listener.start()
                if self._listener is not None:
                    self._listener.stop()
                self._listener, self._key, self._opened_s = listener, key, time.monotonic()
            return pb.OpenProbeReply(port=self._listener.port, key=self._key, endpoints=self._listener.endpoints)

    def close(self) -> None:
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None


def _answer(connection: socket.socket, key: bytes) -> None:
    connection.settimeout(CONNECT_S)
    if hmac.compare_digest(receive(connection, KEY_BYTES), key) and len(receive(connection, PAYLOAD_BYTES)) > 0:
        connection.sendall(bytes(PAYLOAD_BYTES))


def connect_all(routes: Sequence[Route], key: bytes, limit_s: float) -> str:
    """Tries all routes to another node. Returns "" if each works, else why the first does not. Blocking."""
    for route in routes:
        if why := connect(route.host, pb.OpenProbeReply(port=route.port, key=key), limit_s, route.own):
            return why if len(routes) == 1 else f"{route.host}{f' from {route.own}' if route.own else ''}: {why}"
    return ""


def connect(host: str, reply: pb.OpenProbeReply, limit_s: float, own: str = "") -> str:
    """Tries the port of another node, from the address `own` if that is given. Returns "" if it works, else why not.
    Blocking."""
    try:
        with socket.create_connection((host, reply.port), limit_s, (own, 0) if own else None) as connection:
            connection.settimeout(limit_s)
            try:
                connection.sendall(reply.key + bytes(PAYLOAD_BYTES))
                answer = receive(connection, PAYLOAD_BYTES)
            except TimeoutError:
                return f"it connects, but {PAYLOAD_BYTES >> 10} KiB do not arrive: the MTU of the path may be too small"
            except ConnectionError:  # the peer has closed it before it has read everything
                answer = b""
            if len(answer) < PAYLOAD_BYTES:
                return "it connects, but is closed: something on the way answers for the node"
    except OSError as error:
        return str(error.strerror or error)
    return ""


def receive(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer if the connection ends."""
    received = bytearray()
    while len(received) < count and (piece := connection.recv(count - len(received))):
        received += piece
    return bytes(received)
