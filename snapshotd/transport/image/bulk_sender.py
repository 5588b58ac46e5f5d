"""The source's side of bulk connections: beside gRPC, and for each connection one thread that owns it.

The thread sends chunks and receives answers, and sleeps in poll. Encrypting, sending and receiving megabytes happen outside
the interpreter's lock, so the threads use as many cores as there are connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Damaged, Internal, SnapshotError, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake, sockets
from snapshotd.transport.image.frame import Answer, Frame, parse_answer
from snapshotd.transport.image.messages import next_bytes, send_end, send_frame
from snapshotd.transport.keys import Keys
from snapshotd.transport.routes import Route, in_turn
from snapshotd.transport.sealed import SealedConnection, Unauthentic

log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64 << 10


async def open_streams(
    routes: Sequence[Route], key: bytes, credentials: Credentials, node: str, streams: int, *, go_last: bool = False
) -> list[BulkStream]:
    """Connections to the ports that the target has opened. Unreachable if one has no route that works: the caller then uses
    gRPC. `go_last`: other traffic goes first.

    Raises what the target answers if it refuses one."""
    context = await in_thread(handshake.tls_context, credentials, server_side=False)
    about = (key, context, credentials, node)
    connecting = [in_thread(_connect, routes, number, *about) for number in range(max(streams, len(routes)))]
    found = await asyncio.gather(*connecting, return_exceptions=True)
    opened = [one for one in found if not isinstance(one, BaseException)]
    failures = [one for one in found if isinstance(one, BaseException)]
    if failures:
        for connection, _ in opened:
            connection.close()
        if not isinstance(failures[0], OSError):
            raise failures[0]
        raise Unreachable(f"node {node} at {routes[0]}: {failures[0]}") from failures[0]
    if go_last:
        for connection, _ in opened:
            sockets.go_last(connection)
    return [BulkStream(connection, keys) for connection, keys in opened]


def _connect(
    routes: Sequence[Route], first: int, key: bytes, context: ssl.SSLContext, credentials: Credentials, node: str
) -> tuple[socket.socket, Keys]:
    failed: OSError | None = None
    for route, limit_s in in_turn(routes, first):
        try:
            return handshake.connect(route, key, context, credentials, node, limit_s)
        except OSError as error:
            if len(routes) > 1:  # else the caller says it
                log.warning("no connection for images to %s at %s: %s", node, route, error)
            failed = error
    assert failed is not None
    raise failed


class BulkStream:
    """One connection; a `Stream`. Made on the loop that uses it."""

    strong = False

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        self.own_address: str = connection.getsockname()[0]
        self._connection = SealedConnection(connection, keys)
        self._loop = asyncio.get_running_loop()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outbox: deque[Frame | None] = deque()  # None: no more chunks
        self._answers: asyncio.Queue[Answer | SnapshotError | None] = asyncio.Queue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="bulk stream", daemon=True)
        self._thread.start()

    async def send(self, frame: Frame) -> bool:
        """Returns before it is sent: the caller keeps to a window of answers."""
        if self._over:
            return False
        self._outbox.append(frame)
        os.eventfd_write(self._wake, 1)
        return True

    async def receive(self) -> Answer | None:
        answer = await self._answers.get()
        if answer is None or isinstance(answer, SnapshotError):
            self._answers.put_nowait(answer)  # the same for every further call
        if isinstance(answer, SnapshotError):
            raise answer
        return answer

    async def done(self) -> None:
        self._outbox.append(None)
        os.eventfd_write(self._wake, 1)

    def cancel(self) -> None:
        self._over = True
        self._connection.hang_up()

    async def ended(self) -> None:
        await in_thread(self._thread.join)
        if self._wake >= 0:
            self._connection.close()
            os.close(self._wake)
            self._wake = -1

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        last: SnapshotError | None = Internal("the connection for images broke")
        try:
            self._talk()
            last = None
        except SnapshotError as error:
            last = error
        except Unauthentic as error:
            last = Damaged(f"the connection for images from the target was altered: {error}")
        except OSError as error:
            last = Unreachable(f"the connection for images to the target broke: {error}")
        finally:
            self._over = True
            self._deliver(last)

    def _talk(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            while self._outbox:
                frame = self._outbox.popleft()
                if frame is None:
                    send_end(self._connection)
                else:
                    frame.prepare()
                    send_frame(self._connection, frame)
            ready = [fd for fd, _ in poll.poll()]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._connection.fileno() in ready:
                length = next_bytes(self._connection)
                if length is None:
                    return
                if length > _MAX_ANSWER_BYTES:
                    raise Damaged(
                        f"the target sent an answer of {length} bytes, at most {_MAX_ANSWER_BYTES} are allowed"
                    )
                self._deliver(parse_answer(self._connection.read(length)))

    def _deliver(self, answer: Answer | SnapshotError | None) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)
