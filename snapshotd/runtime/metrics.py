"""Metrics in the Prometheus text format over plain HTTP.

They are served from the event loop, so gauges are read between two steps of the daemon and never during one. They contain
numbers only, no names of jobs, commands or users; nevertheless the address should be reachable by the monitoring only.
One daemon is one process, so the registry is a module variable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from snapshotd.api.errors import BadConfig
from snapshotd.proc.host import DAEMON_VERSION

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_REQUEST_LIMIT_BYTES = 8192
_REQUEST_TIMEOUT_S = 5.0

REGISTRY = CollectorRegistry()
_MOVES = Counter("snapshotd_moves", "Moves that ended here, by outcome", ["outcome"], registry=REGISTRY)
_PHASE_SECONDS = Histogram(
    "snapshotd_phase_seconds", "Seconds a phase took", ["phase"], buckets=_SECONDS, registry=REGISTRY
)
_PHASE_BYTES = Counter("snapshotd_phase_bytes", "Bytes a phase moved", ["phase"], registry=REGISTRY)
_RANKS = Gauge("snapshotd_ranks", "Ranks whose process is on this node", registry=REGISTRY)
_IMAGE_BYTES = Gauge("snapshotd_image_held_bytes", "Bytes of images held in memory", registry=REGISTRY)
_CERTIFICATE = Gauge(
    "snapshotd_certificate_expiry_timestamp_seconds",
    "When this daemon's certificate expires, in seconds since 1970",
    registry=REGISTRY,
)
_BUILD = Info("snapshotd", "This daemon", registry=REGISTRY)
_BUILD.info({"version": DAEMON_VERSION})
# A counter with labels is absent until it is first used, and then rate() has no result instead of zero.
for _outcome in ("COMMIT", "ABORT"):
    _MOVES.labels(outcome=_outcome)
ProcessCollector(registry=REGISTRY)

_servers: list[asyncio.Server] = []


def move_ended(outcome: str) -> None:
    """`outcome` is "COMMIT" or "ABORT", as journalled."""
    _MOVES.labels(outcome=outcome).inc()


def phase(name: str, seconds: float, moved_bytes: int = 0) -> None:
    """Records that a phase of a move has ended."""
    _PHASE_SECONDS.labels(phase=name).observe(seconds)
    if moved_bytes:
        _PHASE_BYTES.labels(phase=name).inc(moved_bytes)


def certificate_expires(unix_s: float) -> None:
    _CERTIFICATE.set(unix_s)


def watch(*, ranks: Callable[[], float], image_bytes: Callable[[], float]) -> None:
    """Sets the functions that are called at each scrape. They run on the event loop and must return quickly."""
    _RANKS.set_function(ranks)
    _IMAGE_BYTES.set_function(image_bytes)


async def serve(host: str, port: int) -> int:
    """Serves GET /metrics and returns the port (useful with 0). Raises BadConfig if the address cannot be bound."""
    try:
        server = await asyncio.start_server(_answer, host, port, limit=_REQUEST_LIMIT_BYTES)
    except OSError as error:
        raise BadConfig(f"metrics_listen: cannot listen on {host}:{port}: {error.strerror or error}") from error
    _servers.append(server)
    bound: int = server.sockets[0].getsockname()[1]
    return bound


async def close() -> None:
    while _servers:
        server = _servers.pop()
        server.close()
        await server.wait_closed()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request for each connection: with a scrape every few seconds, keep-alive would save nothing."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split()
            writer.write(_response(request))
            await writer.drain()
    writer.close()


def _response(request: list[bytes]) -> bytes:
    if len(request) != 3 or request[0] != b"GET":
        return _http("405 Method Not Allowed", "text/plain", b"only GET\n")
    if request[1].split(b"?")[0] != b"/metrics":
        return _http("404 Not Found", "text/plain", b"see /metrics\n")
    return _http("200 OK", CONTENT_TYPE_LATEST, generate_latest(REGISTRY))


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body
