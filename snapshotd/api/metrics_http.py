"""Serves metrics over plain HTTP, for the daemon's network process and for the autopilot.

Any host that can reach the address may ask, at any rate and over any number of connections. The text is made once a second at
most, and if there are too many connections, the oldest one is closed. A scraper sends its request at once, so it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from snapshotd.api.calls import CallFailed
from snapshotd.api.errors import BadConfig

_REQUEST_LIMIT_BYTES = 8192
_REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 128
KEPT_S = 1.0

#: Makes the metrics: their content type and the text. May raise CallFailed.
Exposition = Callable[[], Awaitable[tuple[str, bytes]]]


class MetricsServer:
    """Serves GET /metrics from `start` to `close`. One request for each connection: with a scrape every few seconds,
    keep-alive would save nothing."""

    def __init__(self, exposition: Exposition) -> None:
        self._latest = _Latest(exposition)
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest one first
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, setting: str) -> str:
        """Returns the address, with the port that was chosen for port 0. Raises BadConfig, which names the setting."""
        try:
            self._server = await asyncio.start_server(self._accepted, host, port, limit=_REQUEST_LIMIT_BYTES)
        except OSError as error:
            raise BadConfig(
                f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}",
                remedy="name an address of this machine and a port that is free",
            ) from error
        bound = self._server.sockets[0].getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        """Also closes open connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._answer(reader, writer), name="metrics")
        self._open[task] = None
        task.add_done_callback(lambda ended: self._open.pop(ended, None))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split()
                    writer.write(await _response(self._latest, request))
                    await writer.drain()
        finally:
            writer.close()


class _Latest:
    """The metrics, at most KEPT_S old. Requests that arrive while they are made share the answer."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._answer, self._until_s = ("", b""), 0.0
        self._asking = asyncio.Lock()

    async def get(self) -> tuple[str, bytes]:
        async with self._asking:
            if time.monotonic() >= self._until_s:
                self._answer = await self._exposition()
                self._until_s = time.monotonic() + KEPT_S
            return self._answer


async def _response(latest: _Latest, request: list[bytes]) -> bytes:
    if len(request) != 3 or request[0] != b"GET":
        return _http("405 Method Not Allowed", "text/plain", b"only GET\n")
    if request[1].split(b"?")[0] != b"/metrics":
        return _http("404 Not Found", "text/plain", b"see /metrics\n")
    try:
        return _http("200 OK", *await latest.get())
    except CallFailed as failed:
        return _http("503 Service Unavailable", "text/plain", f"{failed.details}\n".encode())


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body
