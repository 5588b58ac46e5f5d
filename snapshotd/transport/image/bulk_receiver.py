"""The target's side of bulk connections: a port for one move beside gRPC, one thread per connection, frames of frame.py.

`Target.OpenImageChannel` opens and authorises them over gRPC. The peer must present the certificate of the move's source
node and send the channel's key (handshake.py). Chunks follow, as over gRPC (grpc_channel.py), encrypted (sealed.py).

Invariant: as there, every chunk is answered once, in order, and a stream that ends early ends with one ERROR answer. New
connections are accepted for OPEN_S at most. `close` leaves no socket and no thread. Memory: one chunk per connection.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Damaged, Internal, SnapshotError
from snapshotd.transport import handshake
from snapshotd.transport.image import grpc_channel
from snapshotd.transport.image.frame import MAX_CHUNK_BYTES, Answer, Frame, Kind, parse_header
from snapshotd.transport.image.messages import next_bytes, send_end, send_message
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.listener import KEY_BYTES, MoveListener
from snapshotd.transport.sealed import Connection, SealedConnection, Unauthentic

log = logging.getLogger(__name__)

OPEN_S = 30.0


class BulkReceivers:
    """All open bulk receivers of this node, one per move. Every method may block, and may be called from any thread."""

    def __init__(
        self, store: ImageStore, credentials: Credentials, hosts: Sequence[str], data_addresses: Sequence[str] = ()
    ) -> None:
        """Listens as MoveListener describes."""
        self._store, self._credentials = store, credentials
        self._hosts, self._data_addresses = hosts, data_addresses
        self._lock = threading.Lock()
        self._open: dict[str, _BulkReceiver] = {}

    def open(self, move: str, source_node: str) -> tuple[int, bytes, Sequence[str]]:
        """(port, key, endpoints) for the move; the same again as long as the port accepts connections."""
        former = None
        with self._lock:
            receiver = self._open.get(move)
            if receiver is None or not receiver.listener.accepting:
                former = receiver
                receiver = self._open[move] = _BulkReceiver(
                    self._store, move, source_node, self._credentials, self._hosts, self._data_addresses
                )
        if former is not None:  # not under the lock: its threads may wait for a disk
            former.listener.close()
        return receiver.listener.port, receiver.key, receiver.listener.endpoints

    def is_busy(self, move: str) -> bool:
        """Whether images of the move are arriving, or may do so any moment."""
        receiver = self._open.get(move)
        return receiver is not None and (receiver.listener.accepting or receiver.listener.connected)

    def close(self, move: str) -> None:
        """No socket and no thread of the move's receiver is left when this returns. Idempotent."""
        with self._lock:
            receiver = self._open.pop(move, None)
        if receiver is not None:
            receiver.listener.close()

    def close_all(self) -> None:
        for move in list(self._open):
            self.close(move)


class _BulkReceiver:
    """The port of one move, and the connections to it."""

    def __init__(
        self,
        store: ImageStore,
        move: str,
        source_node: str,
        credentials: Credentials,
        hosts: Sequence[str],
        data_addresses: Sequence[str],
    ) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._store, self._move, self._source_node, self._credentials = store, move, source_node, credentials
        self._channel = f"image channel of {move}"
        self.listener = MoveListener(
            self._channel,
            hosts,
            self._serve,
            data_addresses=data_addresses,
            tls=handshake.tls_context(credentials, server_side=True),
            max_admitted=grpc_channel.MAX_STREAMS_PER_MOVE,
            open_s=OPEN_S,
        )
        self.listener.start()

    def _serve(self, connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        try:
            handshake.prove_source(connection, self.key, self._credentials, self._source_node, self._channel)
            self.listener.admit(connection)
        except SnapshotError as error:
            handshake.refuse(connection, error, grpc_channel.HANG_UP_S)
            raise
        sealed = SealedConnection(connection, handshake.welcome(connection))
        sealed.settimeout(None)  # with a time limit every read would cost a poll
        try:
            self._receive(sealed)
            send_end(sealed)
        except Unauthentic as error:
            self._refuse(sealed, Damaged(f"the connection from {self._source_node} was altered: {error}"))
        except SnapshotError as error:
            self._refuse(sealed, error)
        except OSError:
            raise
        except Exception as error:
            log.exception("images of %s", self._move)
            self._refuse(sealed, Internal(f"receiving images failed unexpectedly: {error!r}"))

    def _refuse(self, connection: Connection, error: SnapshotError) -> None:
        """Sends the reason and waits until the sender closes: a reset for unread data would overtake the reason."""
        log.warning("images of %s: %s: %s", self._move, error.code, error.message)
        with contextlib.suppress(OSError):  # the sender has gone
            connection.settimeout(grpc_channel.HANG_UP_S)
            send_message(connection, Answer(Kind.ERROR, text=error.to_wire()).message())
            send_end(connection)
        connection.drain(grpc_channel.HANG_UP_S)

    # ------------------------------------------------------------ chunks

    def _receive(self, connection: Connection) -> None:
        buffer = memoryview(bytearray())
        while (length := next_bytes(connection)) is not None:
            if length > MAX_CHUNK_BYTES:
                raise Damaged(f"a message of {length} bytes where a header was expected")
            frame = parse_header(connection.read(length))
            if frame.payload_bytes:
                if len(buffer) < frame.payload_bytes:
                    buffer = memoryview(bytearray(frame.payload_bytes))
                frame.payload = buffer[: frame.payload_bytes]
                _read_payload(connection, frame, frame.payload)
            send_message(connection, self._store.take(self._move, frame).message())


def _read_payload(connection: Connection, frame: Frame, into: memoryview) -> None:
    length = next_bytes(connection)
    if length is None:
        raise Damaged(f"{frame.name}: the stream ended before the payload of the chunk at {frame.offset}")
    if length != frame.payload_bytes:
        got = f"{length} bytes instead of {frame.payload_bytes}"
        raise Damaged(f"{frame.name}: the chunk at {frame.offset} has {got}")
    connection.read_into(into)
