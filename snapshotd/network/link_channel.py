"""A connection to another daemon as the daemon itself sees it: the network process has the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from snapshotd.api.calls import NO_METADATA, CallEnded, CallFailed
from snapshotd.network.frames import Close, Dial
from snapshotd.network.link import Call, Link

#: The network process ends calls in time. If it hangs, the daemon does so itself, a little later.
_LATER_S = 2.0


class LinkChannel:
    """A `calls.Channel`. `link` returns the present link: a network process that died is replaced."""

    def __init__(self, link: Callable[[], Link], number: int, node: str, endpoint: str) -> None:
        self._link, self._number, self._node, self._endpoint = link, number, node, endpoint

    async def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        call = self.stream(method, timeout_s)
        try:
            with contextlib.suppress(CallEnded):
                await call.write(request)
                await call.done_writing()
            reply = await call.read()
            if reply is None or await call.read() is not None:
                raise CallFailed("INTERNAL", "not exactly one reply")
            return reply
        finally:
            call.cancel()

    def stream(self, method: str, timeout_s: float | None = None, metadata: Mapping[str, str] = NO_METADATA) -> Call:
        def dial(call: int) -> Dial:
            listed = list(metadata.items())
            return Dial(call, self._number, self._endpoint, self._node, method, listed, timeout_s)

        call = self._link().open(dial)
        if timeout_s is not None and call.ended is None:
            call.limit(timeout_s + _LATER_S)
        return call

    async def close(self) -> None:
        self._link().send_soon(Close(self._number))
