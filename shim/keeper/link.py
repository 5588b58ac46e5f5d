"""A keeper's connection to the daemon on its node. It reconnects without limit and never blocks the keeper.

Invariant: the queue of outgoing frames is bounded and is dropped with the connection. After every reconnection the
keeper sends its whole state in `hello`, so it does not matter what was lost.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from shim.keeper.frames import Decoder, Frame, FrameError, encode
from shim.keeper.loop import Loop, Wish

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
BYE_S = 2.0  # how long to wait for the daemon's `bye`
#: Relay frames are not queued behind more than this; control frames always are.
ROOM_BYTES = 1 << 20
STATE_CHUNK_BYTES = 1 << 19


class Link:
    def __init__(
        self,
        loop: Loop,
        path: str,
        hello: Callable[[], dict[str, Any]],
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._hello = hello
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._socket: socket.socket | None = None
        self._decoder = Decoder()
        self._outgoing = bytearray()
        self._retry_s = FIRST_RETRY_S
        self.is_welcome = False
        self.trouble = ""  # why the last attempt failed
        loop.add(self._wishes)

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def is_flushed(self) -> bool:
        """Whether everything was written to the socket, or there is no connection."""
        return not self._outgoing or self._socket is None

    def connect(self) -> None:
        if self._socket is not None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            self.trouble = os.strerror(error.errno) if error.errno else str(error)
            if isinstance(error, BlockingIOError):
                self._retry_s = FIRST_RETRY_S  # too many others are just connecting: a matter of milliseconds
            self._retry()
            return
        self._socket = connection
        self._decoder = Decoder()
        self._outgoing.clear()
        self._outgoing += encode("hello", self._hello())

    def send(self, frame_type: str, fields: dict[str, Any] | None = None, payload: bytes = b"") -> bool:
        """Queues a control frame. Returns False without a connection; the next `hello` carries the state instead."""
        if self._socket is None:
            return False
        self._outgoing += encode(frame_type, fields, payload)
        return True

    def send_state(self, move: str, state: dict[str, Any]) -> None:
        """Answers `drain` with the stdio state, in as many frames as needed."""
        encoded = json.dumps(state).encode()
        for start in range(0, len(encoded), STATE_CHUNK_BYTES):
            more = start + STATE_CHUNK_BYTES < len(encoded)
            self.send("stdio", {"move": move, "more": more}, encoded[start : start + STATE_CHUNK_BYTES])

    def relay(self, frame_type: str, fields: dict[str, Any] | None = None, payload: bytes = b"") -> bool:
        """Queues a relay frame, unless there is no connection or too much is queued already."""
        if not self.is_welcome or len(self._outgoing) >= ROOM_BYTES:
            return False
        return self.send(frame_type, fields, payload)

    def welcomed(self) -> None:
        self.is_welcome = True
        self._retry_s = FIRST_RETRY_S

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.is_welcome = False

    def close_and_retry(self) -> None:
        """Reconnects later: the daemon refused this keeper (it may be shutting down, or not know the keeper yet)."""
        self._lose("refused")

    def _lose(self, why: str) -> None:
        self.trouble = why
        self.close()
        self._retry()
        self._on_lost()

    def _retry(self) -> None:
        self._loop.after(self._retry_s, self.connect)
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)

    def _wishes(self) -> Iterable[Wish]:
        if self._socket is not None:
            yield Wish(self._socket.fileno(), self._readable, self._writable if self._outgoing else None)

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except BlockingIOError:
            return
        except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
            self._lose(f"{type(error).__name__}: {error}")  # the keeper survives any input from the daemon

    def _writable(self) -> None:
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._outgoing[: 1 << 18])
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        del self._outgoing[:sent]
