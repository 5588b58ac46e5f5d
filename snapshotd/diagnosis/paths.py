"""Tries the new path of a connection before its rank is frozen: from the peer's address to the target's new one.

Two ends are opened on the target for one attempt: a port, for an ordinary connection, and one end of a connection that has no
beginning (snapshotd/net/mid_stream.py), as every re-pointed connection has none. Each carries full segments both ways, with
the don't-fragment bit. So a closed port, a path that loses large packets, and a firewall that drops segments of connections
whose beginning it has not seen are told apart.

Invariant: nothing that arrives is interpreted. Without the key, which the peer gets over mutual TLS, an end is closed. The
ends of an attempt are closed after it, or after OPEN_S; there are at most MAX_OPEN attempts at a time.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Awaitable, Callable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy
from snapshotd.diagnosis.probes import OPEN_S, PAYLOAD_BYTES, connect, receive
from snapshotd.net import mid_stream
from snapshotd.net.flows import Address
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.listener import KEY_BYTES, MoveListener

MAX_OPEN = 64
#: For each of the two connections of an attempt. A busy node answers later than the network does.
LIMIT_S = 15.0
_PENDING = 4

#: Asks the target to open the two ends.
Open = Callable[[pb.OpenProbeRequest], Awaitable[pb.OpenProbeReply]]


class Paths:
    """The target's side. For any thread; blocking."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[MoveListener] = []
        self._ends: set[socket.socket] = set()

    def open(self, address: str, far: Address) -> pb.OpenProbeReply:
        """Opens both ends at an address of this node, for the peer's end `far`. Raises Internal, Busy or OSError."""
        key = os.urandom(KEY_BYTES)

        def serve(connection: socket.socket) -> None:
            connection.settimeout(OPEN_S)
            if _answered(connection, key):
                listener.stop()

        with self._lock:
            self._listeners = [one for one in self._listeners if one.accepting or one.connected]
            if len(self._listeners) + len(self._ends) >= 2 * MAX_OPEN:
                raise Busy("too many paths are being tried at the same time")
            end = mid_stream.reserve(address)
            try:
                mid_stream.connect(end, far, sends_first=False)
                listener = MoveListener("path", [address], serve, max_pending=_PENDING, open_s=OPEN_S)
            except BaseException:
                mid_stream.drop(end)
                raise
            listener.start()
            self._listeners.append(listener)
            self._ends.add(end)
            reply = pb.OpenProbeReply(port=listener.port, key=key, mid_stream_port=end.getsockname()[1])
        threading.Thread(target=self._serve_end, args=(end, key), name="path", daemon=True).start()
        return reply

    def _serve_end(self, end: socket.socket, key: bytes) -> None:
        try:
            end.settimeout(OPEN_S)
            with contextlib.suppress(OSError):
                if _answered(end, key):
                    end.recv(1)  # the peer has it all
        finally:
            with self._lock:
                self._ends.discard(end)
            with contextlib.suppress(OSError):
                mid_stream.drop(end)

    def close(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()


def _answered(connection: socket.socket, key: bytes) -> bool:
    if not hmac.compare_digest(receive(connection, KEY_BYTES), key):
        return False
    if len(receive(connection, PAYLOAD_BYTES)) < PAYLOAD_BYTES:
        return False
    connection.sendall(bytes(PAYLOAD_BYTES))
    return True


async def attempt(here: str, there: str, ask: Open, limit_s: float = LIMIT_S) -> str:
    """The peer's side: tries the path between two addresses. Returns "" if it works, else what did not pass.

    Raises the SnapshotError of `ask`."""
    try:
        end = await in_thread(mid_stream.reserve, here)
    except OSError as error:
        return f"{here} cannot be used on this node: {error.strerror or error}"
    try:
        far = pb.Endpoint(ip=here, port=end.getsockname()[1])
        reply = await ask(pb.OpenProbeRequest(address=there, far=far))
        if problem := await in_thread(connect, there, reply, limit_s, here):
            return f"a connection to port {reply.port}: {problem}"
        return await in_thread(_try_mid_stream, end, Address(there, reply.mid_stream_port), reply.key, limit_s)
    finally:
        with contextlib.suppress(OSError):
            mid_stream.drop(end)


def _try_mid_stream(end: socket.socket, remote: Address, key: bytes, limit_s: float) -> str:
    what = "segments of a connection whose beginning the network has not seen"
    try:
        mid_stream.connect(end, remote, sends_first=True)
    except OSError as error:
        return f"this kernel makes no connection without a beginning: {error.strerror or error}"
    end.settimeout(limit_s)
    try:
        end.sendall(key + bytes(PAYLOAD_BYTES))
        arrived = len(receive(end, PAYLOAD_BYTES))
        end.sendall(b".")
    except TimeoutError:
        return f"{what} do not arrive: a firewall that tracks connections drops them"
    except OSError as error:
        return f"{what} are rejected ({error.strerror or error}): a firewall that tracks connections answers them"
    return "" if arrived == PAYLOAD_BYTES else f"{what} are answered by another host"
