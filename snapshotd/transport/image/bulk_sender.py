"""The source's end of the bulk lane beside gRPC: connections with TLS, and for each one thread that owns it.

OpenSSL lets no two threads at one connection: the same thread sends chunks and takes answers, and sleeps in poll.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
from collections import deque

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import Damaged, Internal, SnapshotError, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.frame import Answer, Frame, parse_answer
from snapshotd.transport.image.tls_connection import (
    CONNECT_S,
    Inlet,
    hang_up,
    send_end,
    send_frame,
    send_message,
    tls_context,
    tune,
)

_MAX_ANSWER_BYTES = 64 << 10


async def open_streams(
    host: str, port: int, key: bytes, credentials: Credentials, node: str, streams: int
) -> list[BulkStream]:
    """Connections to a lane that the target has opened, or Unreachable: then the lane over gRPC is the way."""
    context = await in_thread(tls_context, credentials, server_side=False)
    connecting = [in_thread(_connect, host, port, key, context, node) for _ in range(streams)]
    found = await asyncio.gather(*connecting, return_exceptions=True)
    opened = [one for one in found if isinstance(one, ssl.SSLSocket)]
    failures = [one for one in found if isinstance(one, BaseException)]
    if failures:
        for connection in opened:
            connection.close()
        if not isinstance(failures[0], OSError):
            raise failures[0]
        raise Unreachable(f"node {node} at {host}:{port}: {failures[0]}") from failures[0]
    return [BulkStream(connection) for connection in opened]


def _connect(host: str, port: int, key: bytes, context: ssl.SSLContext, node: str) -> ssl.SSLSocket:
    plain = socket.create_connection((host, port), timeout=CONNECT_S)
    try:
        tune(plain)
        connection = context.wrap_socket(plain, server_hostname=node)
    except BaseException:
        plain.close()
        raise
    try:
        send_message(connection, key)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


class BulkStream:
    """One connection; a `Stream`. Made on the loop that uses it."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outbox: deque[Frame | None] = deque()  # None: no more
        self._answers: asyncio.Queue[Answer | SnapshotError | None] = asyncio.Queue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="bulk stream", daemon=True)
        self._thread.start()

    async def send(self, frame: Frame) -> bool:
        """Does not wait until it is sent: who sends keeps to a window of answers."""
        if self._over:
            return False
        self._outbox.append(frame)
        os.eventfd_write(self._wake, 1)
        return True

    async def receive(self) -> Answer | None:
        answer = await self._answers.get()
        if answer is None or isinstance(answer, SnapshotError):
            self._answers.put_nowait(answer)  # the last word is the same for whoever asks again
        if isinstance(answer, SnapshotError):
            raise answer
        return answer

    async def done(self) -> None:
        self._outbox.append(None)
        os.eventfd_write(self._wake, 1)

    def cancel(self) -> None:
        self._over = True
        hang_up(self._connection)

    async def ended(self) -> None:
        await in_thread(self._thread.join)
        if self._wake >= 0:
            self._connection.close()
            os.close(self._wake)
            self._wake = -1

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        last: SnapshotError | None = Internal("the stream of images broke")
        try:
            self._talk(Inlet(self._connection))
            last = None
        except SnapshotError as error:
            last = error
        except OSError as error:
            last = Unreachable(f"the target broke the stream of images: {error}")
        finally:
            self._over = True
            self._say(last)

    def _talk(self, inlet: Inlet) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            while self._outbox:
                frame = self._outbox.popleft()
                if frame is None:
                    send_end(self._connection)
                else:
                    send_frame(self._connection, frame)
            ready = [self._connection.fileno()] if self._connection.pending() else [fd for fd, _ in poll.poll()]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._connection.fileno() in ready:
                length = inlet.next_bytes()
                if length is None:
                    return
                if length > _MAX_ANSWER_BYTES:
                    raise Damaged(f"an answer of {length} bytes makes no sense")
                self._say(parse_answer(inlet.read(length)))

    def _say(self, answer: Answer | SnapshotError | None) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)
