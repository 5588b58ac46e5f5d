"""Serves the daemon's metrics over plain HTTP. The text comes from the daemon (runtime/metrics.py).

Any host that can reach the address may ask, at any rate and over any number of connections. The daemon is asked once a second
at most, and if there are too many connections, the oldest one is closed. A scraper sends its request at once, so it is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from snapshotd.api.calls import CallFailed
from snapshotd.api.errors import BadConfig
from snapshotd.network.frames import METRICS, Request
from snapshotd.network.link import Link

_REQUEST_LIMIT_BYTES = 8192
_REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 128
KEPT_S = 1.0


async def serve(link: Link, host: str, port: int) -> asyncio.Server:
    """Serves GET /metrics. Raises BadConfig if the address cannot be bound."""
    latest = _Latest(link)
    open_ones: dict[asyncio.Task[None], None] = {}  # the oldest one first

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request for each connection: with a scrape every few seconds, keep-alive would save nothing."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split()
                    writer.write(await _response(latest, request))
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
        return await asyncio.start_server(accepted, host, port, limit=_REQUEST_LIMIT_BYTES)
    except OSError as error:
        raise BadConfig(f"metrics_listen: cannot listen on {host}:{port}: {error.strerror or error}") from error


class _Latest:
    """The metrics, at most KEPT_S old. Requests that arrive while the daemon is asked share its answer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kind, self._text, self._until_s = b"", b"", 0.0
        self._asking = asyncio.Lock()

    async def get(self) -> tuple[bytes, bytes]:
        """The content type and the text. Raises CallFailed."""
        async with self._asking:
            if time.monotonic() >= self._until_s:
                call = self._link.open(lambda number: Request(number, METRICS, "root", "metrics", []))
                try:
                    self._kind, self._text = await call.read() or b"", await call.read() or b""
                finally:
                    call.cancel()
                self._until_s = time.monotonic() + KEPT_S
            return self._kind, self._text


async def _response(latest: _Latest, request: list[bytes]) -> bytes:
    if len(request) != 3 or request[0] != b"GET":
        return _http("405 Method Not Allowed", "text/plain", b"only GET\n")
    if request[1].split(b"?")[0] != b"/metrics":
        return _http("404 Not Found", "text/plain", b"see /metrics\n")
    try:
        kind, text = await latest.get()
    except CallFailed as failed:
        return _http("503 Service Unavailable", "text/plain", f"{failed.details}\n".encode())
    return _http("200 OK", kind.decode(), text)


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body
