"""Serves the autopilot's metrics over plain HTTP, on its event loop: if the loop hangs, the scrape fails and is noticed.

Any host that can reach the address may ask. The text is made once a second at most, and if there are too many connections,
the oldest one is closed. A scraper sends its request at once, so it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from snapshotd.api.errors import BadConfig

_REQUEST_LIMIT_BYTES = 8192
_REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 128
KEPT_S = 1.0

Exposition = Callable[[], tuple[str, bytes]]


@contextlib.asynccontextmanager
async def serving(host: str, port: int, exposition: Exposition) -> AsyncIterator[str]:
    """Serves GET /metrics, and gives the address, with the port that was chosen for port 0. Raises BadConfig."""
    latest = _Latest(exposition)
    open_ones: dict[asyncio.Task[None], None] = {}  # the oldest one first

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request for each connection: with a scrape every few seconds, keep-alive would save nothing."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split()
                    writer.write(_response(latest, request))
                    await writer.drain()
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_ones) >= MAX_CONNECTIONS:
            oldest = next(iter(open_ones))
            del open_ones[oldest]
            oldest.cancel()
        task = asyncio.create_task(answer(reader, writer), name="metrics")
        open_ones[task] = None
        task.add_done_callback(lambda ended: open_ones.pop(ended, None))

    try:
        server = await asyncio.start_server(accepted, host, port, limit=_REQUEST_LIMIT_BYTES)
    except OSError as error:
        raise BadConfig(
            f"--metrics: cannot listen on {host}:{port}: {error.strerror or error}",
            remedy="name an address of this machine and a port that is free",
        ) from error
    try:
        bound = server.sockets[0].getsockname()
        yield f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
    finally:
        server.close()
        for task in list(open_ones):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


class _Latest:
    """The metrics, at most KEPT_S old."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._answer, self._until_s = ("", b""), 0.0

    def get(self) -> tuple[str, bytes]:
        if time.monotonic() >= self._until_s:
            self._answer = self._exposition()
            self._until_s = time.monotonic() + KEPT_S
        return self._answer


def _response(latest: _Latest, request: list[bytes]) -> bytes:
    if len(request) != 3 or request[0] != b"GET":
        return _http("405 Method Not Allowed", "text/plain", b"only GET\n")
    if request[1].split(b"?")[0] != b"/metrics":
        return _http("404 Not Found", "text/plain", b"see /metrics\n")
    return _http("200 OK", *latest.get())


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body
