"""The target's end of the bulk lane beside gRPC: a port for one move, TLS, a thread per connection, frames of frame.py.

A lane is opened and authorised over gRPC (`Target.OpenImageChannel`). Who connects shows the certificate of the move's source
node and sends the lane's key, which only that node was told; then come chunks, as on the gRPC lane (lane.py).

Invariant: as there, every chunk is answered once, in order, and what ends a stream early is one ERROR answer. A lane
takes new connections for OPEN_S at most; `close` leaves no socket and no thread of it. Memory: one chunk per connection.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import Busy, Damaged, Denied, Internal, SnapshotError
from snapshotd.transport.image import grpc_channel
from snapshotd.transport.image.frame import MAX_CHUNK_BYTES, Answer, Frame, Kind, parse_header
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.tls_connection import (
    CONNECT_S,
    Inlet,
    drain,
    hang_up,
    send_end,
    send_message,
    tls_context,
    tune,
)

LOG = logging.getLogger(__name__)

OPEN_S = 30.0
KEY_BYTES = 32
#: Strangers may connect, and have CONNECT_S to show who they are; beyond so many at a time nobody is listened to.
_MAX_STRANGERS = 32


class BulkLanes:
    """All open lanes of this node, one per move. Every method may block, and be called from any thread."""

    def __init__(self, store: ImageStore, credentials: Credentials, hosts: Sequence[str]) -> None:
        """`hosts`: where to listen, the first that is this machine's own."""
        self._store, self._credentials, self._hosts = store, credentials, hosts
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def open(self, move: str, source_node: str) -> tuple[int, bytes]:
        """(port, key) of the move's lane; asked twice, the same while it takes connections."""
        with self._lock:
            lane_ = self._lanes.get(move)
            if lane_ is None or not lane_.open:
                context = tls_context(self._credentials, server_side=True)
                fresh = _Lane(self._store, move, source_node, context, _listener(self._hosts))
                if lane_ is not None:
                    lane_.close()
                lane_ = self._lanes[move] = fresh
        return lane_.port, lane_.key

    def close(self, move: str) -> None:
        """Nothing of the move's lane is left when this returns. Twice is once."""
        with self._lock:
            lane_ = self._lanes.pop(move, None)
        if lane_ is not None:
            lane_.close()

    def close_all(self) -> None:
        for move in list(self._lanes):
            self.close(move)


def _listener(hosts: Sequence[str]) -> socket.socket:
    failures = []
    for host in hosts:
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                tune(listener)
                listener.bind(address)
                listener.listen()
            except BaseException:
                listener.close()
                raise
        except OSError as error:  # advertised, but translated on the way: not an address of this machine
            failures.append(f"{host}: {error.strerror or error}")
            continue
        return listener
    raise Internal(f"no port to receive images on: {'; '.join(failures)}")


class _Lane:
    """The port of one move, and whoever has connected to it."""

    def __init__(
        self, store: ImageStore, move: str, source_node: str, context: ssl.SSLContext, listener: socket.socket
    ) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self.port: int = listener.getsockname()[1]
        self.open = True
        self._store, self._move, self._source_node = store, move, source_node
        self._context, self._listener = context, listener
        self._lock = threading.Lock()
        self._connections: dict[ssl.SSLSocket, threading.Thread] = {}
        self._admitted: set[ssl.SSLSocket] = set()
        self._thread = threading.Thread(target=self._accept, name=f"lane {move}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.open = False
        hang_up(self._listener)
        self._thread.join()
        with self._lock:
            left = list(self._connections.items())
        for connection, _ in left:
            hang_up(connection)
        for _, thread in left:
            thread.join()

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        ends_s = monotonic() + OPEN_S
        with self._listener:
            while self.open and (left_s := ends_s - monotonic()) > 0:
                self._listener.settimeout(left_s)
                try:
                    plain, _ = self._listener.accept()
                except TimeoutError:
                    break
                except OSError as error:
                    if self.open:
                        LOG.warning("the images of %s: no more connections: %s", self._move, error)
                    break
                with contextlib.suppress(OSError):  # it is gone already
                    self._take(plain)
        self.open = False

    def _take(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(CONNECT_S)
            connection = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"lane {self._move}", daemon=True)
        with self._lock:
            if len(self._connections) - len(self._admitted) >= _MAX_STRANGERS:
                connection.close()
                return
            self._connections[connection] = thread
        thread.start()

    def _serve(self, connection: ssl.SSLSocket) -> None:
        try:
            self._shake_hands(connection)
            self._talk(connection, Inlet(connection))
        except OSError as error:
            if self.open:
                LOG.info("the images of %s: a connection ended: %s", self._move, error)
        finally:
            with self._lock:
                del self._connections[connection]
                self._admitted.discard(connection)
            connection.close()

    def _shake_hands(self, connection: ssl.SSLSocket) -> None:
        """A stranger who is not believed is told so by an alert, and hangs up first: as in `_refuse`."""
        try:
            connection.do_handshake()
        except ssl.SSLError:
            drain(connection, CONNECT_S)
            raise

    def _talk(self, connection: ssl.SSLSocket, inlet: Inlet) -> None:
        try:
            self._admit(connection, inlet)
            connection.settimeout(None)  # with a time limit every record would cost a poll
            self._receive(connection, inlet)
        except SnapshotError as error:
            self._refuse(connection, inlet, error)
        except OSError:
            raise
        except Exception as error:
            LOG.exception("the images of %s", self._move)
            self._refuse(connection, inlet, Internal(f"receiving images failed unexpectedly: {error!r}"))
        send_end(connection)

    def _refuse(self, connection: ssl.SSLSocket, inlet: Inlet, error: SnapshotError) -> None:
        """Says why, and lets the sender hang up first: data that nobody reads would destroy what was said."""
        LOG.warning("the images of %s: %s: %s", self._move, error.code, error.message)
        send_message(connection, Answer(Kind.ERROR, text=error.to_wire()).message())
        ends_s = monotonic() + grpc_channel.HANG_UP_S
        while (left_s := ends_s - monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                if inlet.next_bytes() is None:
                    break
            except TimeoutError:
                break
        connection.settimeout(CONNECT_S)

    def _admit(self, connection: ssl.SSLSocket, inlet: Inlet) -> None:
        """The certificate is of the source node, and that node was told the key."""
        name = _common_name(connection)
        if name != f"node:{self._source_node}":
            raise Denied(f"{name} is not the source of move {self._move}")
        length = inlet.next_bytes()
        if length != KEY_BYTES or not hmac.compare_digest(inlet.read(KEY_BYTES), self.key):
            raise Denied(f"that is not the key of the lane of move {self._move}")
        with self._lock:
            if len(self._admitted) >= grpc_channel.MAX_STREAMS_PER_MOVE:
                raise Busy(f"{self._move} already has {len(self._admitted)} streams")
            self._admitted.add(connection)

    # ------------------------------------------------------------ chunks

    def _receive(self, connection: ssl.SSLSocket, inlet: Inlet) -> None:
        buffer = memoryview(bytearray())
        while (length := inlet.next_bytes()) is not None:
            if length > MAX_CHUNK_BYTES:
                raise Damaged(f"a message of {length} bytes where a header was expected")
            frame = parse_header(inlet.read(length))
            if frame.payload_bytes:
                if len(buffer) < frame.payload_bytes:
                    buffer = memoryview(bytearray(frame.payload_bytes))
                frame.payload = buffer[: frame.payload_bytes]
                _read_payload(inlet, frame, frame.payload)
            stored = self._store.write(self._move, frame)
            if not stored:
                LOG.warning("the images of %s: %s at %d arrived damaged", self._move, frame.name, frame.offset)
            send_message(connection, Answer(Kind.OK if stored else Kind.BAD, frame.sequence).message())


def _read_payload(inlet: Inlet, frame: Frame, into: memoryview) -> None:
    length = inlet.next_bytes()
    if length is None:
        raise Damaged(f"{frame.name}: the stream ended before the payload of the chunk at {frame.offset}")
    if length != frame.payload_bytes:
        got = f"{length} bytes instead of {frame.payload_bytes}"
        raise Damaged(f"{frame.name}: the chunk at {frame.offset} has {got}")
    inlet.read_into(into)


def _common_name(connection: ssl.SSLSocket) -> str:
    subject: Any = (connection.getpeercert() or {}).get("subject", ())  # a tuple of tuples of pairs
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else f"{names!r}"
