"""A call to a daemon as messages of bytes: the interface between api/client.py and what carries calls.

Two things carry them: a gRPC connection (api/channel.py; in migrator and in the daemon's network process), and the link to
the network process (network/link.py; in the daemon itself, which has no connections of its own).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

#: The largest message in either direction.
MAX_MESSAGE_BYTES = 16 << 20

OK = "OK"
NO_METADATA: Mapping[str, str] = {}


class CallFailed(Exception):
    """The call ended with a status other than OK. `error` is the wire form of an error of the taxonomy, if there is one."""

    def __init__(self, status: str, details: str = "", error: bytes = b"") -> None:
        super().__init__(f"{status}: {details}")
        self.status, self.details, self.error = status, details, error


class CallEnded(Exception):
    """Nothing can be written any more, because the call has ended: `read` raises the reason."""


class StreamCall(Protocol):
    """Messages in both directions. After an end that is not OK, or after `cancel`, `read` raises CallFailed."""

    async def write(self, message: bytes | memoryview) -> None:
        """Waits while the peer reads slower than this side writes. Raises CallEnded."""

    async def done_writing(self) -> None:
        """Announces that no more messages follow. Raises CallEnded."""

    async def read(self) -> bytes | None:
        """The next message, None at the end. Raises CallFailed."""

    def cancel(self) -> None: ...


class Channel(Protocol):
    """A connection to one daemon. `method` is the full path, such as "/snapshotd.v1.Node/GetNode"."""

    async def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One request, one reply. Raises CallFailed."""

    def stream(
        self, method: str, timeout_s: float | None = None, metadata: Mapping[str, str] = NO_METADATA
    ) -> StreamCall: ...

    async def close(self) -> None: ...
